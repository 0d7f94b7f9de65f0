# SPDX-License-Identifier: Apache-2.0
"""Operators that only place elements, `cat` and `flip`; and `equal`."""

from __future__ import annotations

from typing import Any

import torch

from ..ranges import cut
from .call import Call, major_axis

__all__ = ["NAMES", "run"]

NAMES = frozenset({"cat", "equal", "flip"})


def run(call: Call) -> Any:
    """Run the call operand by operand, or block by block. Bitwise the same."""
    return {"cat": _cat, "equal": _equal, "flip": _flip}[call.traits.name.split(".")[1]](call)


def _cat(call: Call) -> torch.Tensor:
    values = call.named()
    tensors = [one for one in values["tensors"] if one.shape != (0,)]
    described = call.described()
    if described is None:
        raise call.refuse("PyTorch cannot say beforehand what its result looks like")
    result = call.result(described[0].size(), described[0].dtype, described[0].stride())
    start, axis = 0, values["dim"]
    for one in tensors:
        call.place(result.narrow(axis, start, one.size(axis)), one)
        start += one.size(axis)
    return result


def _equal(call: Call) -> bool:
    one, other = call.arguments
    if one.shape != other.shape:
        return False
    return bool(torch.eq(one, other).all())


def _flip(call: Call) -> torch.Tensor:
    operand, dims = call.arguments
    axis = major_axis(operand)
    if axis is None:
        raise call.refuse("there is nothing to cut")
    turned = axis in [dim % operand.dim() for dim in dims]
    length = operand.size(axis)
    result = call.result(operand.size(), operand.dtype)
    step = call.step(length, lambda step: call.cost([operand.narrow(axis, 0, step)]))
    for start, stop in cut(length, step):
        block = torch.flip(operand.narrow(axis, start, stop - start), dims)
        call.place(result.narrow(axis, length - stop if turned else start, stop - start), block)
    return result
