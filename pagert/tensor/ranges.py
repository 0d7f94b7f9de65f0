# SPDX-License-Identifier: Apache-2.0
"""Cutting tensors into ranges, and the shares of the device tier that what is cut may take.

A range of elements is a whole number of pages: kernels work on vectors and treat the rest at the end alone, so that a
cut at whole vectors changes no element's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pagert.geometry import byte_range, is_dense

__all__ = ["cut", "flat", "groups", "page_step", "page_sum", "rounded", "same_order", "share_bytes"]

# Each is a part of the device tier: what is cut takes at most this part of it.
WHOLE_IN_DEVICE = 4  # lists and copies up to this size are not cut; a streamed operator's larger result is paged
GROUPS_IN_DEVICE = 128  # one group of a list that is cut
PIECES_IN_DEVICE = 32  # the operands of one range of a deferred update
HELD_IN_DEVICE = 2  # a parameter that is held while the ranges of its update run
COPIES_IN_DEVICE = 8  # one range of a copy
BLOCKS_IN_DEVICE = 8  # the operands of one block of a streamed operator

# Blocks of an axis are multiples of one of these where they are longer: whole vectors, whole tiles of a product.
ROUND_LENGTHS = (64, 16)


def share_bytes(runtime: Any, parts: int) -> int:
    """Return one of so many equal parts of the device tier: whole pages, at least one. In bytes."""
    page_bytes: int = runtime.page_bytes
    return max(page_bytes, runtime.storage.nbytes() // parts // page_bytes * page_bytes)


def page_sum(tensor: torch.Tensor, page_bytes: int) -> int:
    """Return what the pages that `tensor` touches take, from the first to the last. In bytes."""
    offset_bytes, size_bytes = byte_range(tensor)
    if size_bytes == 0:
        return 0
    first, last = offset_bytes // page_bytes, (offset_bytes + size_bytes - 1) // page_bytes
    return (last - first + 1) * page_bytes


def page_step(runtime: Any, item_bytes: Sequence[int], parts: int) -> int:
    """Return the elements of one range of alike operands, of which each has `item_bytes` an element.

    They take at most one of `parts` of the device tier if that is possible, and each is a whole number of pages.
    """
    unit: int = runtime.page_bytes // min(item_bytes)
    units = share_bytes(runtime, parts) // (unit * sum(item_bytes))
    return unit * max(1, units)


def rounded(step: int) -> int:
    """Return the length of a block that is at most `step`, and a good one for kernels."""
    for length in ROUND_LENGTHS:
        if step > length:
            return step // length * length
    return step


def cut(length: int, step: int, least: int = 1, first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, stop) of `step` that make up `length`, from `first` on.

    A rest below `least` joins the last one.
    """
    start = first
    while start < length:
        stop = min(length, start + step)
        if length - stop < least:
            stop = length
        yield start, stop
        start = stop


def groups(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cut indices into ranges whose sizes add up to at most `limit`, or that are of one index."""
    found: list[tuple[int, int]] = []
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            found.append((start, index))
            start, total = index, 0
        total += size
    found.append((start, len(sizes)))
    return found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order in which they lie, as a view."""
    found: torch.Tensor = torch.ops.aten.as_strided.default(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return found


def same_order(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether all have their elements in the same order of memory, without holes and without lazy signs."""
    first = tensors[0]
    if any(one.is_neg() or one.is_conj() or one.shape != first.shape for one in tensors):
        return False
    if all(one.is_contiguous() for one in tensors):
        return True
    return is_dense(first.size(), first.stride()) and all(one.stride() == first.stride() for one in tensors)
