# SPDX-License-Identifier: Apache-2.0
"""Operators that treat each row alone: softmax, normalisation, losses of classes, scans along an axis.

A block of rows is computed as the whole computes them, so results are bitwise the same. What is added up over rows (a
bias's gradient, a mean loss) is added up block by block: close, not the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ranges import cut
from . import elements
from .call import Call
from .table import loaded

__all__ = ["NAMES", "run"]

# The operands that have the axis of the rows. The axis `dim` is not cut.
_ALONG = {
    "_softmax": ("self",),
    "_log_softmax": ("self",),
    "_softmax_backward_data": ("grad_output", "output"),
    "_log_softmax_backward_data": ("grad_output", "output"),
    "cumsum": ("self",),
    "cumprod": ("self",),
    "logcumsumexp": ("self",),
    "sort": ("self",),
    "topk": ("self",),
}
_NORMS = {
    "native_layer_norm": ("input",),
    "_fused_rms_norm": ("input",),
    "native_layer_norm_backward": ("grad_out", "input", "mean", "rstd"),
    "_fused_rms_norm_backward": ("grad_out", "input", "rstd"),
}
_LOSSES = ("nll_loss_forward", "nll_loss_backward")

NAMES = frozenset({*_ALONG, *_NORMS, *_LOSSES})


def run(call: Call) -> Any:
    """Run the call by blocks of rows. Blocks until all have run."""
    base = call.traits.name.split(".")[1]
    values = call.named()
    if base in _LOSSES:
        return _loss(call, base, values)
    if base in _NORMS:
        lead = values["input"]
        axes = list(range(lead.dim() - len(values["normalized_shape"])))
        names = _NORMS[base]
    else:
        names = _ALONG[base]
        lead = values[names[0]]
        axes = [axis for axis in range(lead.dim()) if axis != values["dim"] % lead.dim()]
    axis = _axis(call, lead, axes)
    bounds = _bounds(call, [values[name] for name in names], axis)
    sums = 1 if base.endswith("norm_backward") else None  # results from here on are added up
    return _join(call, values, names, axis, bounds, sums)


def _axis(call: Call, lead: torch.Tensor, axes: Sequence[int]) -> int:
    axes = [axis for axis in axes if lead.size(axis) > 1]
    if not axes:
        raise call.refuse("it needs a whole row at once, and one row does not fit")
    return max(axes, key=lead.stride)


def _bounds(call: Call, operands: Sequence[torch.Tensor], axis: int) -> list[tuple[int, int]]:
    def measure(step: int) -> int:
        return call.cost([one.narrow(axis, 0, step) for one in operands])

    length = operands[0].size(axis)
    return list(cut(length, call.step(length, measure)))


def _join(
    call: Call,
    values: dict[str, Any],
    names: Sequence[str],
    axis: int,
    bounds: Sequence[tuple[int, int]],
    sums: int | None = None,
) -> Any:
    """Run the operator on each block; join its results along `axis`, from result `sums` on add them up."""
    length = bounds[-1][1]
    targets: list[Any] = []
    for start, stop in bounds:
        cuts = {name: call.near(values[name].narrow(axis, start, stop - start)) for name in names}
        returned = _call(call, values | cuts)
        parts = returned if type(returned) in (list, tuple) else [returned]
        for index, part in enumerate(parts):
            is_sum = sums is not None and index >= sums
            if len(targets) < len(parts):
                targets.append(part if is_sum or part is None else _whole(call, part, axis, length))
            elif is_sum and part is not None:
                targets[index] = targets[index] + part
            if not is_sum and part is not None:
                call.place(targets[index].narrow(axis, start, stop - start), part)
    return targets[0] if len(call.traits.op._schema.returns) == 1 else tuple(targets)


def _whole(call: Call, part: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    size = list(part.size())
    size[axis] = length
    return call.result(size, part.dtype)


def _call(call: Call, values: dict[str, Any]) -> Any:
    schema = call.traits.op._schema.arguments
    arguments = [values[one.name] for one in schema if not one.kwarg_only]
    return call.traits.op(*arguments, **{one.name: values[one.name] for one in schema if one.kwarg_only})


def _loss(call: Call, base: str, values: dict[str, Any]) -> Any:
    lead = values["self"]
    if lead.dim() != 2:
        raise call.refuse("it runs by blocks of rows for operands of two axes, (rows, classes)")
    if base == "nll_loss_forward":
        if values["weight"] is None and lead.is_contiguous():
            return _picked_loss(call, values)
        return _summed_loss(call, values)
    names = ["self", "target"]
    if values["grad_output"].dim() == 1:
        names.append("grad_output")
    axis = _axis(call, lead, [0])
    return _join(call, values, names, axis, _bounds(call, [lead], axis))


def _picked_loss(call: Call, values: dict[str, Any]) -> Any:
    """Only one element of each row counts: fetch these, and let the kernel add them up. Bitwise the same."""
    lead, target, ignored = values["self"], values["target"], values["ignore_index"]
    if type(target) is call.cls:
        target = loaded(target)
    counts = target != ignored
    rows, classes = lead.size()
    outside = counts & ((target < 0) | (target >= classes))
    if outside.any():
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")
    places = torch.arange(rows) * classes + torch.where(counts, target, 0)
    picked = elements.take(call, lead, places).reshape(rows, 1)
    only = torch.where(counts, 0, -100)
    return call.traits.op(picked, only, None, values["reduction"], -100)


def _summed_loss(call: Call, values: dict[str, Any]) -> Any:
    lead = values["self"]
    bounds = _bounds(call, [lead], _axis(call, lead, [0]))
    if values["reduction"] == 0:
        total = None
        losses = call.result((lead.size(0),), lead.dtype)
        for start, stop in bounds:
            cuts = {name: values[name].narrow(0, start, stop - start) for name in ("self", "target")}
            part, total = _call(call, values | cuts)
            call.place(losses[start:stop], part)
        return losses, total
    parts: list[Any] = []
    for start, stop in bounds:
        cuts = {name: values[name].narrow(0, start, stop - start) for name in ("self", "target")}
        parts.append(_call(call, values | cuts | {"reduction": 2}))
    loss = torch.stack([one for one, _ in parts]).sum()
    total = torch.stack([one for _, one in parts]).sum()
    return (loss / total if values["reduction"] == 1 else loss), total
