# SPDX-License-Identifier: Apache-2.0
"""Optimizer kernels that run when one of their tensors is next looked at, as a CUDA kernel runs after its call.

An optimizer's step touches the whole training state within a moment, so the links are the only thing that works
then, and idle in the forward pass that follows. `_fused_adamw_` and its like do the same to each index of their lists
and return nothing: an index may wait until somebody needs its parameter, its gradient or its state. Then it
runs, on what it was given: the tensors' bytes are what they were, since whoever would change them comes here first,
and plain tensors (step counts, a learning rate) were copied. The numbers are the same, an update's reads and writes
move behind the forward pass, and a parameter is fetched once for its update and its use.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert._core.footprint import geometry
from pagert._core.operation import Operation, Turn
from pagert._core.pump import UPDATE, Region
from pagert.errors import OutOfFrames
from pagert.geometry import byte_range

from .ranges import HELD_IN_DEVICE, PIECES_IN_DEVICE, cut, page_step

if TYPE_CHECKING:
    from .region_tensor import RegionTensor
    from .traits import Traits

__all__ = ["Update", "defer"]

SNAPSHOT_BYTES = 4096  # larger plain tensors are not copied: their index runs at once

_keys = itertools.count()


class Update:
    """One index of an optimizer's kernel, to be run by whoever needs one of its tensors first.

    Parameters
    ----------
    cls : type
        The paged tensor's class.
    traits : Traits
        Of the operator, which does the same to each element.
    arguments, options
        Of this index. Their paged tensors are owners of their own, of one geometry; plain ones belong to the update.
    """

    __slots__ = ("__weakref__", "_arguments", "_cls", "_options", "_ran", "_running", "_traits", "_turn")

    def __init__(
        self,
        cls: type[RegionTensor],
        traits: Traits,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        self._cls = cls
        self._traits = traits
        self._arguments = arguments
        self._options = options
        self._ran: list[None] = []  # one for each range that the kernel has been through
        self._turn = Turn(arguments[0][0]._runtime.pump)
        self._running = False

    @property
    def waits(self) -> bool:
        """Whether it has not run, and nobody runs it now."""
        return bool(self._arguments) and not self._running

    def run(self) -> None:
        """Run the kernel, range by range. Blocks; once it has run it does nothing.

        After an error or Ctrl-C it goes on with the range that did not run: no element is updated twice.
        """
        with self._turn:
            if not self._arguments:
                return
            if self._running:
                raise RuntimeError(
                    f"{self._traits.name}: a signal handler or a finalizer looks at a tensor whose "
                    "update it has interrupted"
                )
            try:
                self._running = True
                # Whoever looks may do so under a mode, of which this is none of the business.
                with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                    self._run_ranges()
            finally:
                self._running = False
            # Owners of pages: a gradient that nobody else holds is released here.
            self._arguments = ()
            self._options = {}

    def _run_ranges(self) -> None:
        lead = self._arguments[0][0]
        element_count = lead.numel()
        operand_count = sum(_count_paged(self._cls, one) for one in self._arguments)
        step = page_step(lead._runtime, [lead.itemsize] * operand_count, PIECES_IN_DEVICE)
        whole = Operation(self._cls, self._traits.name)
        if step < element_count and byte_range(lead)[1] <= lead._runtime.storage.nbytes() // HELD_IN_DEVICE:
            whole.add(lead, UPDATE)  # in one window from the start: somebody waits for it
        try:
            with contextlib.suppress(OutOfFrames):  # other windows may leave room for ranges alone
                whole.pin()
            self._run_each(step, element_count)
        finally:
            whole.end()

    def _run_each(self, step: int, element_count: int) -> None:
        for start, stop in cut(element_count, step, first=len(self._ran) * step):
            arguments = [self._cut(value, start, stop) for value in self._arguments]
            self._cls._dispatcher.run(self._traits, arguments, self._options, self._call)

    def _call(self, *dense: Any, **options: Any) -> None:
        # The list is filled in C while the kernel is called: no signal handler gets in between, and what it raises
        # does not make a range look as if it had not run.
        kernel = functools.partial(self._traits.call, **options)
        self._ran.extend(map(kernel, *([value] for value in dense)))

    def _cut(self, value: Any, start: int, stop: int) -> Any:
        if type(value) is not list:
            return value
        return [_range(self._cls, one, start, stop) for one in value]


def defer(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any], length: int
) -> list[int]:
    """Defer the indices of a list operator for which that is possible. Returns the others.

    What waits keeps its gradient alive, so that nothing is deferred where the tiers below could get full by it.
    """
    if not _has_room(cls, traits, arguments):
        return list(range(length))
    snapshot = {name: _snapshot(cls, value) for name, value in options.items()}
    if any(value is NotImplemented or name in traits.list_names for name, value in snapshot.items()):
        return list(range(length))
    rest: list[int] = []
    theirs: set[int] = set()  # regions of the others: what shares them comes after them
    for index in range(length):
        regions = {id(one._region) for one in _operands(cls, traits, arguments, index)}
        if not theirs.isdisjoint(regions) or not _defer_one(cls, traits, arguments, snapshot, index):
            rest.append(index)
            theirs |= regions
    return rest


def _operands(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], index: int
) -> list[RegionTensor]:
    lists = (
        value
        for name, value in zip(traits.argument_names, arguments, strict=False)
        if name in traits.list_names and value
    )
    return [value[index] for value in lists if type(value[index]) is cls]


def _has_room(cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any]) -> bool:
    """Whether the gradients, and all that the device holds, fit what is free below it."""
    assert traits.gradients is not None
    gradients = [one for one in arguments[traits.gradients] if type(one) is cls]
    if not gradients or not gradients[0]._runtime.defer_updates:
        return False
    return sum(byte_range(one)[1] for one in gradients) < gradients[0]._runtime.spare_bytes()


def _defer_one(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any], index: int
) -> bool:
    taken: list[Any] = []
    owners: list[RegionTensor] = []
    for position, (name, value) in enumerate(zip(traits.argument_names, arguments, strict=False)):
        if name in traits.list_names:
            if not value:
                taken.append([])
                continue
            value = value[index]
            if type(value) is cls:
                owners.append(value)
                taken.append([value])
                continue
        value = _snapshot(cls, value)
        if value is NotImplemented or position in traits.written:
            return False  # what is written to a copy would be lost
        taken.append([value] if name in traits.list_names else value)
    if not _are_alike(owners) or type(taken[0][0]) is not cls:
        return False
    for owner in owners:
        owner._region.settle()  # type: ignore[union-attr]
    update = Update(cls, traits, [_own(cls, value) for value in taken], options)
    runtime = owners[0]._runtime
    runtime.deferred[next(_keys)] = update
    for owner in owners:
        owner._region.deferred = update  # type: ignore[union-attr]
    return True


def _snapshot(cls: type[RegionTensor], value: Any) -> Any:
    """What an argument is now. NotImplemented where it is paged or too large to copy."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is cls or value.numel() * value.itemsize > SNAPSHOT_BYTES:
        return NotImplemented
    return value.clone()


def _are_alike(tensors: Sequence[RegionTensor]) -> bool:
    """Whether the operands of an index lie alike, each in a region of its own, so that they can be cut alike."""
    if not tensors:
        return False
    first = tensors[0]
    if not first.is_contiguous() or first.is_complex() or first.numel() == 0:
        return False
    if any(not isinstance(one._region, Region) or one._runtime is not first._runtime for one in tensors):
        return False
    if len({id(one._region) for one in tensors}) < len(tensors):
        return False
    return all(
        one.size() == first.size()
        and one.stride() == first.stride()
        and one.dtype == first.dtype
        and not one.is_neg()
        for one in tensors
    )


def _own(cls: type[RegionTensor], value: Any) -> Any:
    """Make owners of their own of an argument's paged tensors: they do not wait for the update."""
    if type(value) is not list:
        return value
    return [
        cls._wrap(geometry(one), one._region.share(), one._runtime)  # type: ignore[union-attr]
        if type(one) is cls
        else one
        for one in value
    ]


def _count_paged(cls: type[RegionTensor], value: Any) -> int:
    return sum(type(one) is cls for one in value) if type(value) is list else 0


def _range(cls: type[RegionTensor], tensor: Any, start: int, stop: int) -> Any:
    """Elements [start, stop) of a paged tensor in the order in which they lie."""
    if type(tensor) is not cls or (start == 0 and stop == tensor.numel()):
        return tensor
    plain = geometry(tensor)
    offset = byte_range(tensor)[0] // tensor.itemsize
    flat = plain.as_strided((stop - start,), (1,), offset + start)
    return cls._wrap(flat, tensor._region, tensor._runtime)
