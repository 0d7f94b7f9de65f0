# SPDX-License-Identifier: Apache-2.0
"""Operators that do the same to each element: by ranges of whole pages, or by blocks of an axis.

Where all operands lie alike, they are cut as they lie, into ranges of whole pages: a kernel treats full vectors alike
wherever they stand, and only the rest at the end alone. Where they do not (an operand that is broadcast, another
layout), the call is cut along the axis of the largest stride, as the kernel's own outermost loop does it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ..ranges import BLOCKS_IN_DEVICE, cut, flat, page_step, same_order
from .call import Call, major_axis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["covers", "run"]

# Elementwise, and not tagged by PyTorch as such.
_UNTAGGED = frozenset(
    {
        "__and__",
        "__or__",
        "copy",
        "elu_backward",
        "fill",
        "hardshrink_backward",
        "hardsigmoid_backward",
        "hardswish",
        "hardswish_backward",
        "hardtanh_backward",
        "leaky_relu_backward",
        "log_sigmoid_backward",
        "log_sigmoid_forward",
        "masked_fill",
        "mish_backward",
        "polar",
        "complex",
        "softplus_backward",
        "softshrink_backward",
        "where",
        "zero",
    }
)
# Tagged, but also the name of a reduction: these overloads alone are elementwise.
_REDUCTIONS_TOO = {"max": ("other", "out"), "min": ("other", "out")}
# Each element takes its random numbers from the generator in turn, so that ranges take them as the whole does.
_RANDOM = frozenset({"uniform_", "normal_", "random_", "cauchy_", "log_normal_", "geometric_"})
NORMAL_LENGTH_MIN = 16  # fewer elements of `normal_` take another way to their random numbers
_LIST_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")
_LIST_REDUCTIONS = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})


@functools.cache
def _is_tagged(name: str) -> bool:
    """Tell whether PyTorch says of any overload, in place or not, that it is elementwise: some lack the tag."""
    for base in (name, f"{name}_"):
        packet = getattr(torch.ops.aten, base, None)
        for overload in packet.overloads() if packet is not None else ():
            if torch.Tag.pointwise in getattr(packet, overload).tags:
                return True
    return False


def covers(op: torch._ops.OpOverload, base: str) -> bool:
    """Tell whether the operator computes each element of its results from the operands' elements at its place."""
    if base.startswith(_LIST_PREFIXES):
        return base not in _LIST_REDUCTIONS
    if base in _REDUCTIONS_TOO:
        return op._overloadname in _REDUCTIONS_TOO[base]
    name = base.rstrip("_") or base
    return base in _RANDOM or name in _UNTAGGED or _is_tagged(name)


def run(call: Call) -> Any:
    """Run the call by ranges or blocks. Blocks until all have run.

    After an error what is written in place has been written up to the range that failed.
    """
    if any(type(value) in (list, tuple) and len(value) > 1 and _holds_tensors(value) for value in call.arguments):
        raise call.refuse("a list operator streams one index at a time")
    if call.shares_written():
        raise call.refuse("what it writes overlaps another operand, so that it cannot run block by block")
    tensors = list(call.tensors())
    size = torch.broadcast_shapes(*(one.shape for one in tensors))
    written = _written(call)
    if any(one.shape != size for one in written if one.numel() > 1):
        raise call.refuse(f"what it writes has another shape than the operands together, {tuple(size)}")
    targets = written or _results(call)
    whole = [one for one in tensors if one.numel() > 1]
    if same_order([*whole, *targets]) and whole[0].shape == size:
        _run_flat(call, whole, written, targets)
    elif call.traits.name.split(".")[1] in _RANDOM:
        raise call.refuse("random numbers are drawn by ranges only where the elements lie without holes")
    else:
        _run_along(call, len(size), written, targets)
    return _returned(call, targets)


def _holds_tensors(value: Sequence[Any]) -> bool:
    return any(isinstance(one, torch.Tensor) for one in value)


def _written(call: Call) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for position, value in [*enumerate(call.arguments), *call.options.items()]:
        if position in call.traits.written and value is not None:
            found += value if type(value) in (list, tuple) else [value]
    return [one for one in found if one.numel() > 1]


def _results(call: Call) -> list[torch.Tensor]:
    described = call.described()
    if described is None:
        raise call.refuse("PyTorch cannot say beforehand what its results look like")
    return [call.result(one.size(), one.dtype, one.stride()) for one in described]


def _run_flat(
    call: Call, whole: Sequence[torch.Tensor], written: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> None:
    length = whole[0].numel()
    sizes = [one.itemsize for one in (*whole, *(() if written else targets)) if type(one) is call.cls]
    step = page_step(call.runtime, sizes or [1], BLOCKS_IN_DEVICE)
    flats = {id(one): flat(one) for one in (*whole, *targets)}

    def change(one: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if one.numel() > 1:
            return flats[id(one)][start:stop]
        return one.reshape(1) if one.dim() > 1 else one

    for start, stop in cut(length, step, NORMAL_LENGTH_MIN):
        _run_part(
            call,
            functools.partial(change, start=start, stop=stop),
            None if written else [flats[id(one)][start:stop] for one in targets],
        )


def _run_along(call: Call, dims: int, written: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    lead = max([*(one for one in targets if type(one) is call.cls), *call.paged], key=_size_bytes)
    axis = major_axis(lead)
    if axis is None:
        raise call.refuse("there is nothing to cut")
    from_end = axis - lead.dim()
    length = lead.size(axis)

    def change(one: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if one.dim() + from_end < 0 or one.size(from_end) == 1:
            return one
        return one.narrow(from_end, start, stop - start)

    def measure(step: int) -> int:
        return call.cost([change(one, 0, step) for one in (*call.paged, *targets)])

    kept = {id(one) for one in written}

    def near(one: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        part = change(one, start, stop)
        return part if id(one) in kept else call.near(part)

    for start, stop in cut(length, call.step(length, measure)):
        _run_part(
            call,
            functools.partial(near, start=start, stop=stop),
            None if written else [one.narrow(from_end, start, stop - start) for one in targets],
        )


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _run_part(
    call: Call, change: Callable[[torch.Tensor], torch.Tensor], places: Sequence[torch.Tensor] | None
) -> None:
    arguments, options = call.mapped(change)
    returned = call.traits.op(*arguments, **options)
    if places is None:
        return
    parts = returned if type(returned) in (list, tuple) else [returned]
    for place, part in zip(places, parts, strict=True):
        call.place(place, part)


def _returned(call: Call, targets: Sequence[torch.Tensor]) -> Any:
    returns = call.traits.op._schema.returns
    if not returns:
        return None
    if str(returns[0].type) == "List[Tensor]":
        return list(targets)
    return targets[0] if len(returns) == 1 else tuple(targets)
