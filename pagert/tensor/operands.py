# SPDX-License-Identifier: Apache-2.0
"""The paged operands of one operator call: pinned together, seen as dense views, let go together.

A dense view lies in the device arena and is valid only between `pin()` and `release()`. What an
operator returns goes through `leave()`: nothing that shares the arena's bytes gets out as a plain
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pagert._core.pump import OVERWRITE, READ, UPDATE
from pagert.config import format_bytes
from pagert.errors import ForeignTensor, OutOfFrames, TierFull, UnsupportedOperator
from pagert.geometry import byte_range, describe, fills_range

if TYPE_CHECKING:
    from pagert._core.pump import Pin

    from .paged_tensor import PagedTensor
    from .plan import Plan

__all__ = ["Operands", "flat", "geometry", "leave", "over_storage"]

_MODE_NAMES = {READ: "read", UPDATE: "update", OVERWRITE: "overwrite"}
_SEQUENCES = (list, tuple)
_NONE: frozenset[int] = frozenset()
_VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class Operands:
    """Collect with `add`, `pin`, run on `dense` values, `leave` with the results, `release`."""

    __slots__ = (
        "_accesses",
        "_addresses",
        "_cls",
        "_dense",
        "_empty",
        "_guarded",
        "_name",
        "_pin",
        "_tensors",
        "_whole",
        "runtime",
    )

    def __init__(self, cls: type[PagedTensor], name: str) -> None:
        self._cls = cls
        self._name = name
        self.runtime: Any = None
        self._tensors: list[PagedTensor] = []  # one for each access
        self._accesses: list[tuple[Any, int, int, int]] = []
        # Rare: operands without elements, which have no bytes to pin; accesses whose dense view
        # must not grow; accesses to the whole region.
        self._empty: tuple[PagedTensor, ...] = ()
        self._guarded: frozenset[int] = _NONE
        self._whole: frozenset[int] = _NONE
        self._dense: dict[int, tuple[PagedTensor, torch.Tensor]] = {}  # by the operand's id
        self._pin: Pin | None = None
        self._addresses: Sequence[int] = ()  # in the arena, one for each access while it is pinned

    def collect(self, value: Any, mode: int) -> None:
        """Add the paged tensors of one argument: a tensor, a list of tensors or anything else."""
        kind = type(value)
        if kind is self._cls:
            self.add(value, mode)
        elif kind in _SEQUENCES:
            for item in value:
                if type(item) is self._cls:
                    self.add(item, mode)

    def add(
        self, tensor: PagedTensor, mode: int, guarded: bool = False, whole: bool = False
    ) -> None:
        """Add one paged tensor.

        A `guarded` one gets a dense view that refuses to be resized larger; with `whole`, the view
        lies in a storage that is the tensor's whole region.
        """
        if self.runtime is None:
            self.runtime = tensor._runtime
        elif tensor._runtime is not self.runtime:
            raise ForeignTensor(
                f"{self._name}: tensors of two pagers meet: {describe(self._tensors[0])} and "
                f"{describe(tensor)}; move one over with `pager.tensor(other)`"
                if self._tensors
                else f"{self._name}: tensors of two pagers meet"
            )
        offset_bytes, size_bytes = byte_range(tensor)
        if size_bytes == 0:
            self._empty += (tensor,)
            return
        region: Any = tensor._region
        if region.deferred is not None:
            region.settle()
        if whole:
            self._whole |= {len(self._accesses)}
            offset_bytes, size_bytes = 0, torch._C.TensorBase.untyped_storage(tensor).nbytes()
        if mode == OVERWRITE and not fills_range(tensor):
            mode = UPDATE
        if guarded:
            self._guarded |= {len(self._accesses)}
        self._tensors.append(tensor)
        self._accesses.append((region, offset_bytes, size_bytes, mode))

    def pin(self) -> None:
        """Bring every operand to the device and hold it there. Blocks until all are resident."""
        accesses = self._accesses
        if len(accesses) > 1 and any(access[3] == OVERWRITE for access in accesses):
            self._keep_shared_bytes()
        if accesses:
            try:
                self._pin = pin = self._hold()
            except OutOfFrames as error:
                raise self._explain(error) from error
            try:
                self._addresses = pin.device_bytes
                self._look(pin.device_bytes)
            except BaseException:
                self.release()
                raise
        for tensor in self._empty:
            dense = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            self._dense[id(tensor)] = (tensor, dense)

    def _hold(self) -> Pin:
        try:
            return self.runtime.pump.pin(self._accesses)  # type: ignore[no-any-return]
        except TierFull:
            if not self.runtime.settle():  # what is deferred may hold gradients that nobody else does
                raise
        return self.runtime.pump.pin(self._accesses)  # type: ignore[no-any-return]

    def _look(self, starts: Sequence[int]) -> None:
        """Make the dense views of what is pinned."""
        storage = self.runtime.storage
        dense = self._dense
        for index, tensor in enumerate(self._tensors):
            start = starts[index]
            if index in self._whole:
                region = storage[start : start + self._accesses[index][2]]
                view = _dense_view(tensor, region, int(tensor.storage_offset()))
            elif index in self._guarded:
                window = storage[start : start + self._accesses[index][2]]
                view = _dense_view(tensor, window, 0)
            else:
                view = _dense_view(tensor, storage, start // tensor.itemsize)
            dense[id(tensor)] = (tensor, view)

    def release(self) -> None:
        """Let every operand go; the dense views must not be used any more."""
        if self._pin is not None:
            self._pin.release()
            self._pin = None

    def __enter__(self) -> Operands:
        self.pin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def dense(self, value: Any) -> Any:
        """Replace the paged tensors in one argument by their dense views."""
        kind = type(value)
        if kind is self._cls:
            return self._dense[id(value)][1]
        if kind in _SEQUENCES:
            return kind(
                [self._dense[id(item)][1] if type(item) is self._cls else item for item in value]
            )
        return value

    def leave(self, result: Any) -> Any:
        """Turn what the operator returned into what its caller may keep."""
        if isinstance(result, torch.Tensor):
            return self._leave_tensor(result)
        if type(result) in _SEQUENCES:
            return type(result)([self.leave(item) for item in result])
        return result

    def _leave_tensor(self, result: torch.Tensor) -> torch.Tensor:
        for tensor, dense in self._dense.values():
            if result is dense:
                return tensor
        if result.layout is not torch.strided:
            self._refuse_hidden_alias(result)
            return result
        index = self._find_alias(result)
        if index is None:
            return result
        if result.is_nested or result.is_quantized:
            self._refuse_alias(result)
        owner = self._tensors[index]
        start_bytes = result.data_ptr() - self.runtime.storage.data_ptr()
        offset_bytes = self._accesses[index][1] + start_bytes - self._addresses[index]
        return self._cls._view(owner, result, offset_bytes // result.itemsize)

    def _find_alias(self, result: torch.Tensor) -> int | None:
        """Return the index of the access whose bytes `result` shares, if there is one."""
        if not self._addresses:
            return None
        start = result.data_ptr() - self.runtime.storage.data_ptr()
        if not 0 <= start < self.runtime.storage.nbytes():
            return None
        for index, access in enumerate(self._accesses):
            if 0 <= start - self._addresses[index] < access[2]:
                return index
        raise UnsupportedOperator(
            f"{self._name}: it returned an alias of device memory that is not its operand's"
        )

    def _refuse_hidden_alias(self, result: torch.Tensor) -> None:
        for part in _strided_parts(result):
            if self._find_alias(part) is not None:
                self._refuse_alias(result)

    def _refuse_alias(self, result: torch.Tensor) -> NoReturn:
        layout = "nested" if result.is_nested else result.layout
        raise UnsupportedOperator(
            f"{self._name}: its result, of layout {layout} and dtype {result.dtype}, would keep "
            "an alias of paged bytes; give it a plain copy of the operand"
        )

    def _keep_shared_bytes(self) -> None:
        """Make overwrites updates where the same call also uses the region in another way."""
        count: dict[int, int] = {}
        for access in self._accesses:
            count[id(access[0])] = count.get(id(access[0]), 0) + 1
        self._accesses = [
            (region, offset, size, UPDATE)
            if mode == OVERWRITE and count[id(region)] > 1
            else (region, offset, size, mode)
            for region, offset, size, mode in self._accesses
        ]

    def _explain(self, error: OutOfFrames) -> OutOfFrames:
        operands = "; ".join(
            f"{describe(tensor)} ({_MODE_NAMES[access[3]]})"
            for tensor, access in zip(self._tensors, self._accesses, strict=True)
        )
        message = [
            f"{self._name}: its paged operands do not fit the device tier together: {operands}"
        ]
        needed, capacity = error.needed_bytes, error.capacity_bytes
        unpinned = error.unpinned_bytes
        if needed is not None and capacity is not None and unpinned is not None:
            message.append(
                f"they need {format_bytes(needed)} in pages; {format_bytes(unpinned)} of "
                f"{format_bytes(capacity)} are not pinned"
            )
        message.append(
            "raise device_bytes, leave `resident()` contexts earlier, or use smaller tensors"
        )
        explained = OutOfFrames("; ".join(message))
        explained.needed_bytes, explained.capacity_bytes = needed, capacity
        explained.unpinned_bytes = unpinned
        return explained


def geometry(tensor: PagedTensor) -> torch.Tensor:
    """Return a plain tensor of the same geometry over the same storage, which has no memory.

    View kernels of PyTorch work on it without a dispatch to this package. It never gets out.
    """
    # Below autograd's two layers, or it would know the tensor as its base and keep it alive.
    with (
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING),
        torch._C._DisableTorchDispatch(),
    ):
        return torch.ops.aten.alias.default(tensor)


def over_storage(
    tensor: PagedTensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Return a plain tensor of any geometry over the storage of `tensor`, which has no memory.

    `set_` would ask for the address of the bytes, which are refused to every reader.
    """
    found = geometry(tensor)
    with torch.inference_mode(False), torch.no_grad():
        if dtype != tensor.dtype:
            torch._C._set_neg(found, False)
            if found.is_complex():
                torch._C._set_conj(found, False)
            size_bytes = torch._C.TensorBase.untyped_storage(tensor).nbytes()
            whole = found.as_strided((size_bytes // found.itemsize,), (1,), 0).view(torch.uint8)
            found = whole[: size_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return found.as_strided(size, stride, offset)


def flat(runtime: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the device tier as one plain tensor; dense views are cut out of it."""
    storage = runtime.storage
    with torch.inference_mode(False):  # or it would be good for nothing else
        found = torch.empty(0, dtype=dtype, device=storage.device)
        found.set_(storage, 0, (storage.nbytes() // found.itemsize,), (1,))
    runtime.flat[dtype] = found
    return found


def leave(
    cls: type[PagedTensor],
    plan: Plan,
    tensors: list[PagedTensor],
    ranges: Sequence[tuple[int, int]],
    device_bytes: Sequence[int],
    dense: Sequence[torch.Tensor],
    result: Any,
) -> Any:
    """Do what `Operands.leave` does, for operands that were pinned the short way."""
    operands = Operands(cls, plan.name)
    operands.runtime = tensors[0]._runtime
    operands._tensors = tensors
    operands._accesses = [
        (tensor._region, *span, READ) for tensor, span in zip(tensors, ranges, strict=True)
    ]
    operands._addresses = device_bytes
    operands._dense = {id(t): (t, view) for t, view in zip(tensors, dense, strict=True)}
    return operands.leave(result)


def _dense_view(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    dense = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    dense.set_(storage, offset, tensor.size(), tensor.stride())
    if tensor.is_neg():
        torch._C._set_neg(dense, True)
    if tensor.is_complex() and tensor.is_conj():
        torch._C._set_conj(dense, True)
    return dense


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
