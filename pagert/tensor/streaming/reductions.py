# SPDX-License-Identifier: Apache-2.0
"""Reductions, by blocks of the axis of the largest stride.

Where that axis stays, each result is computed whole in one block: bitwise the same. Where it is reduced, the blocks'
results are put together: exact for comparisons (`amax`, `any`, `argmax`, ...), and for sums, products and norms close,
because the order of summation is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ranges import cut, flat
from .call import Call, major_axis

__all__ = ["covers", "run"]

_SUMS = frozenset({"sum", "nansum", "mean", "count_nonzero", "prod"})
_NORMS = frozenset({"norm", "linalg_vector_norm", "_foreach_norm"})
_EXTREMES = frozenset({"amax", "amin", "max", "min", "_foreach_max"})
_LOGICAL = frozenset({"any", "all"})
_PLACES = frozenset({"argmax", "argmin"})
_UNDIVIDED = frozenset({"var", "std", "var_mean", "std_mean", "logsumexp", "median", "nanmedian", "mode", "kthvalue"})
_NAMES = _SUMS | _NORMS | _EXTREMES | _LOGICAL | _PLACES | _UNDIVIDED
_HALVES = frozenset({torch.bfloat16, torch.float16})


def covers(op: torch._ops.OpOverload, base: str) -> bool:
    """Tell whether the operator is a reduction of the kinds below, over all or some axes of one tensor."""
    return base in _NAMES and op._overloadname not in ("other", "out", "names_dim")


def run(call: Call) -> Any:
    """Run the call block by block. Blocks until all have run."""
    base = call.traits.name.split(".")[1]
    values = call.named()
    operand = values["self"]
    is_list = type(operand) in (list, tuple)
    if is_list:
        if len(operand) != 1:
            raise call.refuse("a list operator streams one index at a time")
        operand = operand[0]
    keep = bool(values.get("keepdim", False))
    dims = values.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    whole = not dims
    dims = sorted({dim % operand.dim() for dim in dims}) or list(range(operand.dim()))
    if whole and base in _PLACES:
        if not operand.is_contiguous():
            raise call.refuse("over all axes it runs block by block where the operand is contiguous")
        operand, dims = flat(operand), [0]
    axis = _axis(call, base, operand, dims)
    bounds = list(cut(operand.size(axis), _step(call, operand, axis)))
    if axis not in dims:
        return _join(call, operand, axis, axis if keep else axis - sum(dim < axis for dim in dims), bounds)
    places = base in _PLACES or (base in ("max", "min") and not whole)
    if places:
        found = _fold_places(operand, dims[0], axis, bounds, keep and not (whole and base in _PLACES), "max" in base)
        result: Any = found[1] if base in _PLACES else found
        if whole and keep and base in _PLACES:
            result = result.reshape([1] * values["self"].dim())
        return result
    part, fold, last = _kind(base, values, operand, dims, keep)
    total: Any = None
    for start, stop in bounds:
        one = part(operand.narrow(axis, start, stop - start))
        total = one if total is None else fold(total, one)
    total = last(total)
    return [total] if is_list else total


def _axis(call: Call, base: str, operand: torch.Tensor, dims: list[int]) -> int:
    """Return the axis to cut: any, or one that stays where a reduction needs all that it reduces at once."""
    axis = major_axis(operand)
    if axis is not None and not (base in _UNDIVIDED and axis in dims):
        return axis
    axes = [one for one in range(operand.dim()) if one not in dims and operand.size(one) > 1]
    if not axes:
        raise call.refuse("it needs all that it reduces at once, and that does not fit")
    return max(axes, key=operand.stride)


def _step(call: Call, operand: torch.Tensor, axis: int) -> int:
    return call.step(operand.size(axis), lambda step: call.cost([operand.narrow(axis, 0, step)]))


def _join(call: Call, operand: torch.Tensor, axis: int, place: int, bounds: list[tuple[int, int]]) -> Any:
    targets: list[torch.Tensor] = []
    for start, stop in bounds:
        block = call.near(operand.narrow(axis, start, stop - start))
        returned = call.traits.op(block, *call.arguments[1:], **call.options)
        parts = returned if type(returned) in (list, tuple) else [returned]
        for index, one in enumerate(parts):
            if len(targets) < len(parts):
                size = list(one.size())
                size[place] = operand.size(axis)
                targets.append(call.result(size, one.dtype))
            call.place(targets[index].narrow(place, start, stop - start), one)
    return targets[0] if len(call.traits.op._schema.returns) == 1 else tuple(targets)


def _kind(
    base: str, values: dict[str, Any], operand: torch.Tensor, dims: list[int], keep: bool
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return how a block is reduced, how two blocks' results are put together, and what is done in the end."""
    if base in _LOGICAL:
        dtype = torch.uint8 if operand.dtype is torch.uint8 else torch.bool
        reduce: Any = torch.any if base == "any" else torch.all
        fold: Any = torch.logical_or if base == "any" else torch.logical_and
        return lambda one: reduce(one, dims, keep), fold, lambda total: total.to(dtype)
    if base in _EXTREMES:
        is_max = "max" in base
        reduce = torch.amax if is_max else torch.amin
        return lambda one: reduce(one, dims, keep), torch.maximum if is_max else torch.minimum, lambda total: total
    if base in _NORMS:
        return _norm(base, values, operand, dims, keep)
    dtype = values.get("dtype") or operand.dtype
    is_counted = base == "count_nonzero" or not (dtype.is_floating_point or dtype.is_complex)
    if is_counted and base != "mean" and values.get("dtype") is None:
        dtype = torch.int64
    wide = torch.float32 if dtype in _HALVES else dtype
    if base == "prod":
        return (
            lambda one: _products(one, dims, keep, wide),
            torch.mul,
            lambda total: total.to(dtype),
        )
    if base == "count_nonzero":
        return lambda one: torch.count_nonzero(one, dims), torch.add, lambda total: total
    reduce = torch.nansum if base == "nansum" else torch.sum
    count = 1
    for dim in dims:
        count *= operand.size(dim)
    if base == "mean":
        return lambda one: reduce(one, dims, keep, dtype=wide), torch.add, lambda total: (total / count).to(dtype)
    return lambda one: reduce(one, dims, keep, dtype=wide), torch.add, lambda total: total.to(dtype)


def _products(one: torch.Tensor, dims: list[int], keep: bool, dtype: torch.dtype) -> torch.Tensor:
    for dim in reversed(dims):
        one = torch.prod(one, dim, keep, dtype=dtype)
    return one


def _norm(
    base: str, values: dict[str, Any], operand: torch.Tensor, dims: list[int], keep: bool
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    order = values.get("p" if base == "norm" else "ord", 2)
    order = 2 if order is None else order
    dtype = values.get("dtype") or operand.dtype
    if dtype.is_complex:
        dtype = dtype.to_real()
    wide = torch.float32 if dtype in _HALVES else None

    def part(one: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(one, order, dims, keep, dtype=wide or values.get("dtype")).unsqueeze(0)

    def last(parts: torch.Tensor) -> torch.Tensor:
        return (parts.sum(0) if order == 0 else torch.linalg.vector_norm(parts, order, 0)).to(dtype)

    return part, lambda one, other: torch.cat([one, other]), last


def _fold_places(
    operand: torch.Tensor, dim: int, axis: int, bounds: list[tuple[int, int]], keep: bool, is_max: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the extreme values along `dim`, which is cut, and the first place of each."""
    values: Any = None
    places: Any = None
    for start, stop in bounds:
        block = operand.narrow(axis, start, stop - start)
        one, place = torch.max(block, dim, keep) if is_max else torch.min(block, dim, keep)
        place = place + start
        if values is None:
            values, places = one, place
            continue
        better = one > values if is_max else one < values
        if one.is_floating_point():
            better = better & ~torch.isnan(values) | (torch.isnan(one) & ~torch.isnan(values))
        values, places = torch.where(better, one, values), torch.where(better, place, places)
    return values, places
