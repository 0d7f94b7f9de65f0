# SPDX-License-Identifier: Apache-2.0
"""Copies of what lies scattered: only the pages that hold something of it are pinned, many pieces at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pagert._core.operation import Operation
from pagert._core.pump import OVERWRITE, READ
from pagert.geometry import byte_range

from .ranges import BLOCKS_IN_DEVICE, cut, page_sum, share_bytes

if TYPE_CHECKING:
    from .region_tensor import RegionTensor

__all__ = ["is_scattered", "move", "plain_like"]

ACCESSES_MAX = 64  # pieces of one pin

_Pair = tuple[torch.Tensor, torch.Tensor]


def move(cls: type[RegionTensor], target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Copy `source` into `target`, of the same shape. Neither need fit the device tier; either may be plain.

    They must not overlap, or lie alike.
    """
    paged: Any = target if type(target) is cls else source
    if type(paged) is not cls:
        target.copy_(source)
        return
    runtime = paged._runtime
    limit = share_bytes(runtime, BLOCKS_IN_DEVICE)
    if type(target) is cls and type(source) is cls and _turns(target, source, limit):
        _move_by_blocks(cls, target, source, name, limit)
        return
    batch: list[_Pair] = []
    total = 0
    for piece in _pieces(cls, (target, source), runtime.page_bytes, limit):
        size = _pages(cls, piece, runtime.page_bytes)
        if batch and (total + size > limit or len(batch) == ACCESSES_MAX):
            _copy(cls, batch, name)
            batch, total = [], 0
        batch.append(piece)
        total += size
    if batch:
        _copy(cls, batch, name)


def plain_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor without values whose axes lie in the order in which those of `tensor` lie."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    plain = torch.empty([tensor.size(axis) for axis in order], dtype=tensor.dtype, device=tensor.device)
    return plain.permute([order.index(axis) for axis in range(tensor.dim())])


def _turns(target: torch.Tensor, source: torch.Tensor, limit: int) -> bool:
    """Whether large tensors lie in different orders: a piece that is compact in one is scattered in the other."""
    if min(byte_range(target)[1], byte_range(source)[1]) <= limit:
        return False
    return _major(target) != _major(source)


def _major(tensor: torch.Tensor) -> int:
    axes = [axis for axis in range(tensor.dim()) if tensor.size(axis) > 1]
    return max(axes, key=tensor.stride, default=0)


def _move_by_blocks(
    cls: type[RegionTensor], target: torch.Tensor, source: torch.Tensor, name: str, limit: int
) -> None:
    """Collect each block of the target in plain memory first: it is written once, and the source read for each."""
    axis = _major(target)
    unit_bytes = max(1, target.numel() // target.size(axis) * max(target.itemsize, source.itemsize))
    for start, stop in cut(target.size(axis), max(1, limit // unit_bytes)):
        place, view = target.narrow(axis, start, stop - start), source.narrow(axis, start, stop - start)
        if unit_bytes > limit and byte_range(view)[1] > limit:
            move(cls, place.select(axis, 0), view.select(axis, 0), name)
            continue
        block = plain_like(place).to(source.dtype)
        move(cls, block, view, name)
        move(cls, place, block, name)


def _copy(cls: type[RegionTensor], batch: list[_Pair], name: str) -> None:
    operation = Operation(cls, name)
    for target, source in batch:
        operation.collect(target, OVERWRITE)
        operation.collect(source, READ)
    with operation:
        for target, source in batch:
            operation.dense(target).copy_(operation.dense(source))


def _pieces(cls: type[RegionTensor], pair: _Pair, page_bytes: int, limit: int) -> Iterator[_Pair]:
    """Cut a copy until each piece fits, and pins no page that it does not touch."""
    if pair[0].numel() == 0:
        return
    paged = [one for one in pair if type(one) is cls]
    worst = max(paged, key=lambda one: byte_range(one)[1])
    fits = _pages(cls, pair, page_bytes) <= limit
    if fits and not any(_is_scattered(one, page_bytes) for one in paged):
        yield pair
        return
    axes = [axis for axis in range(worst.dim()) if worst.size(axis) > 1]
    if not axes:
        yield pair
        return
    axis = max(axes, key=worst.stride)
    length = worst.size(axis)
    middle = length // 2
    for start, count in ((0, middle), (middle, length - middle)):
        yield from _pieces(
            cls,
            (pair[0].narrow(axis, start, count), pair[1].narrow(axis, start, count)),
            page_bytes,
            limit,
        )


def is_scattered(tensor: torch.Tensor, page_bytes: int) -> bool:
    """Whether its pages hold much more than its elements."""
    needed_bytes = tensor.numel() * tensor.itemsize
    return page_sum(tensor, page_bytes) > 2 * needed_bytes + 2 * page_bytes


def _is_scattered(tensor: torch.Tensor, page_bytes: int) -> bool:
    """Whether whole pages lie between its elements."""
    if byte_range(tensor)[1] <= 2 * max(page_bytes, tensor.numel() * tensor.itemsize):
        return False
    steps = [step for step, length in zip(tensor.stride(), tensor.size(), strict=True) if length > 1]
    return max(steps, default=0) * tensor.itemsize > page_bytes


def _pages(cls: type[RegionTensor], pair: _Pair, page_bytes: int) -> int:
    return sum(page_sum(one, page_bytes) for one in pair if type(one) is cls)
