# SPDX-License-Identifier: Apache-2.0
"""Saved tensors go to pages: hooks of autograd over a forward pass, and what they put in a graph.

A graph holds a `Packed` for each tensor that an operator saved. It never holds the tensor itself: that would be a
cycle where an operator saves its result.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from pagert.config import format_bytes
from pagert.geometry import byte_range
from pagert.tensor.copying import load
from pagert.tensor.paged_tensor import PagedTensor

from .saved import Saved, Stored

if TYPE_CHECKING:
    from pagert.runtime import Runtime

__all__ = ["Activations"]

_log = logging.getLogger("pagert")


# Type, shape, and the node that made it with the number of its output.
_Told = tuple[str, torch.Size, "str | None", int]


class Packed:
    """A saved tensor as a graph holds it.

    PyTorch compares versions only where a saved tensor has no hooks, so it is done here. `watch` shares the version
    counter of the original; where that was stored it has no memory, so that the original's is free.
    """

    __slots__ = ("plain", "stored", "tensor", "told", "version", "watch")

    def __init__(
        self, tensor: torch.Tensor, watch: torch.Tensor, told: _Told, stored: Stored | None = None, plain: bool = False
    ) -> None:
        self.tensor = tensor  # what backward gets
        self.watch = watch
        self.version = watch._version
        self.told = told  # what the original was, for an error
        self.stored = stored  # keeps what other views may share
        self.plain = plain  # too large for an operand


def unpack(packed: Packed) -> torch.Tensor:
    """Return what was saved, or raise PyTorch's error where the original was changed in place since."""
    if packed.watch._version != packed.version:
        raise _changed(packed)
    if packed.stored is None:
        return packed.tensor
    packed.stored.fetch_before()
    return _loaded(packed.tensor) if packed.plain or _in_compiled_code() else packed.tensor


class Activations:
    """Context of a forward pass whose saved tensors go to pages; see `Pager.activations`.

    Attributes
    ----------
    stored_count, stored_bytes : int
        Tensors that were copied into pages, and the bytes that this took.
    shared_count : int
        Tensors that were saved and lay in pages already: saved before, or views of what was.
    left_count, left_bytes : int
        Tensors that stay as they are, and their bytes: small ones, parameters, paged ones, and those that cannot be
        paged. A tensor that is saved twice counts twice.
    """

    def __init__(
        self, runtime: Runtime, saved: Saved, min_bytes: int, module: torch.nn.Module | None = None
    ) -> None:
        self._runtime = runtime
        self._saved = saved
        self._min_bytes = min_bytes
        self._limit_bytes = runtime.storage.nbytes() // 2
        self._module = module
        self._own: frozenset[int] = frozenset()
        self._open: list[saved_tensors_hooks] = []  # they lead back here: kept no longer than the block
        self.stored_count = self.stored_bytes = self.shared_count = self.left_count = self.left_bytes = 0

    def __enter__(self) -> Activations:
        self._runtime._check_open("pager.activations")
        if self._module is not None:
            self._own = frozenset(_storages(self._module))
        hooks = saved_tensors_hooks(self._pack, unpack)
        hooks.__enter__()
        self._open.append(hooks)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.pop().__exit__(*exception)
        _log.info("%s", self)

    def __str__(self) -> str:
        return (
            f"activations: {format_bytes(self.stored_bytes)} of {self.stored_count} saved tensors went to pages, "
            f"{self.shared_count} were there already; {self.left_count} with {format_bytes(self.left_bytes)} stay as "
            f"they are (small, parameters, or paged)"
        )

    def _pack(self, tensor: torch.Tensor) -> Packed:
        told = _tell(tensor)
        if not self._is_pageable(tensor):
            return self._leave(tensor, told)
        storage = tensor.untyped_storage()
        if storage._cdata in self._own:
            return self._leave(tensor, told)
        size_bytes = byte_range(tensor)[1]
        stored = self._saved.find(tensor, storage)
        if stored is not None:
            self.shared_count += 1
        elif size_bytes >= max(self._min_bytes, 1):
            stored = self._saved.store(self._runtime, tensor, storage)
            self.stored_count += 1
            self.stored_bytes += stored.pages.numel()
        else:
            return self._leave(tensor, told, alone=storage.nbytes() >= max(4 * size_bytes, self._min_bytes, 1))
        plain = size_bytes > self._limit_bytes
        return Packed(stored.view(tensor), _counter(tensor), told, stored, plain)

    def _is_pageable(self, tensor: torch.Tensor) -> bool:
        """Tell whether it is a plain tensor with bytes, on the device that computes, and no look at a parameter."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if tensor.is_nested or tensor.device != self._runtime.device:
            return False
        root = tensor._base
        for one in (tensor,) if root is None else (tensor, root):
            if (one.is_leaf and one.requires_grad) or isinstance(one, torch.nn.Parameter):
                return False
        return True

    def _leave(self, tensor: torch.Tensor, told: _Told, alone: bool = False) -> Packed:
        """Keep a tensor as it is.

        One that is `alone` is small and looks at a large storage, of which it must not be what keeps it alive.
        """
        self.left_count += 1
        if tensor.layout is torch.strided:
            self.left_bytes += byte_range(tensor)[1]
        if alone:
            return Packed(_apart(tensor.detach()), _counter(tensor), told)
        if tensor.is_leaf:
            return Packed(tensor, tensor, told)  # nothing that it holds leads back to a graph
        kept = tensor.detach()
        if type(kept) is not type(tensor):
            kept = kept.as_subclass(type(tensor))
        return Packed(kept, kept, told)


def _counter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that shares the version counter of another one."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _tell(tensor: torch.Tensor) -> _Told:
    node = tensor.grad_fn
    return tensor.type(), tensor.shape, None if node is None else node.name(), tensor.output_nr


def _changed(packed: Packed) -> RuntimeError:
    """Return the error of PyTorch for a saved tensor that was changed in place."""
    kind, shape, node, output = packed.told
    made = "" if node is None else f", which is output {output} of {re.sub(r'Backward[0-9]*$', '', node)}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}]{made}, is at version {packed.watch._version}; expected version {packed.version} "
        "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False)."
    )


def _storages(module: torch.nn.Module) -> list[int]:
    """Return the keys of the storages behind a module's plain parameters and buffers."""
    return [
        tensor.untyped_storage()._cdata
        for tensors in (module.parameters(), module.buffers())
        for tensor in tensors
        if type(tensor) is not PagedTensor and tensor.layout is torch.strided
    ]


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain copy of the bytes that a tensor touches, with its geometry."""
    flat = tensor.as_strided((byte_range(tensor)[1] // tensor.itemsize,), (1,), tensor.storage_offset())
    return flat.clone().as_strided(tensor.size(), tensor.stride(), 0)


def _loaded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the values and the geometry of a paged one."""
    paged: Any = torch.ops.aten.as_strided.default(
        tensor, (byte_range(tensor)[1] // tensor.itemsize,), (1,), tensor.storage_offset()
    )
    return load(PagedTensor, paged).as_strided(tensor.size(), tensor.stride(), 0)


def _in_compiled_code() -> bool:
    """Tell whether the node that runs is one of torch.compile's: such code takes addresses."""
    node = torch._C._current_autograd_node()
    return hasattr(type(node), "_aot_id") or "CompiledFunction" in type(node).__name__
