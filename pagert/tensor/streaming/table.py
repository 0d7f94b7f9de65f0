# SPDX-License-Identifier: Apache-2.0
"""Rows of a large table, read and written by pinning their pages alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pagert._core.operation import Operation
from pagert._core.pump import READ, UPDATE

from ..ranges import page_sum
from .call import Call

__all__ = ["gather", "loaded", "scatter", "spread"]

ACCESSES_MAX = 64  # groups of neighbouring rows in one pin


def loaded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain copy of a paged tensor; a plain one as it is."""
    if type(tensor) is torch.Tensor:
        return tensor
    plain = torch.empty(tensor.size(), dtype=tensor.dtype)
    return plain.copy_(tensor)


def gather(call: Call, table: Any, rows: torch.Tensor) -> torch.Tensor:
    found = torch.empty((rows.numel(), *table.size()[1:]), dtype=table.dtype)

    def act(dense: torch.Tensor, places: torch.Tensor, start: int, stop: int) -> None:
        torch.index_select(dense, 0, places, out=found[start:stop])

    _visit(call, table, rows, READ, act)
    return found


def scatter(call: Call, table: Any, rows: torch.Tensor, values: torch.Tensor) -> None:
    def act(dense: torch.Tensor, places: torch.Tensor, start: int, stop: int) -> None:
        dense.index_copy_(0, places, values[start:stop])

    _visit(call, table, rows, UPDATE, act)


def _visit(
    call: Call,
    table: Any,
    rows: torch.Tensor,
    mode: int,
    act: Callable[[torch.Tensor, torch.Tensor, int, int], None],
) -> None:
    """Pin the pages of ascending rows, as many at a time as fit a block, and act on each group of neighbours."""
    batch: list[tuple[Any, int, int]] = []
    total = 0
    for start, stop in _neighbours(call, table, rows):
        first, last = int(rows[start]), int(rows[stop - 1])
        view = table[first : last + 1]
        size = page_sum(view, call.runtime.page_bytes)
        if batch and (total + size > call.block_bytes or len(batch) == ACCESSES_MAX):
            _act(call, batch, rows, mode, act)
            batch, total = [], 0
        batch.append((view, start, stop))
        total += size
    if batch:
        _act(call, batch, rows, mode, act)


def _act(
    call: Call,
    batch: Sequence[tuple[Any, int, int]],
    rows: torch.Tensor,
    mode: int,
    act: Callable[[torch.Tensor, torch.Tensor, int, int], None],
) -> None:
    operation = Operation(call.cls, call.traits.name)
    for view, _, _ in batch:
        operation.add(view, mode)
    with operation:
        for view, start, stop in batch:
            act(operation.dense(view), rows[start:stop] - rows[start], start, stop)


def _neighbours(call: Call, table: Any, rows: torch.Tensor) -> list[tuple[int, int]]:
    """Group rows so that no whole page lies between two of a group, and a group fits a block."""
    row_bytes = max(1, table.stride(0) * table.itemsize)
    gap = max(1, call.runtime.page_bytes // row_bytes)
    longest = max(1, call.block_bytes // row_bytes)
    values = rows.tolist()
    found: list[tuple[int, int]] = []
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] - values[index - 1] > gap or values[index] - values[start] >= longest:
            found.append((start, index))
            start = index
    return found


def spread(call: Call, table: torch.Tensor, index: torch.Tensor) -> int:
    """Return what the pages of the rows take. In bytes."""
    page_bytes = call.runtime.page_bytes
    step_bytes = table.stride(0) * table.itemsize
    start = table.storage_offset() * table.itemsize + torch.unique(index) * step_bytes
    row_bytes = table[0].numel() * table.itemsize
    first, last = start // page_bytes, (start + row_bytes - 1) // page_bytes
    return int(((last - first + 1).sum()) * page_bytes) if row_bytes >= page_bytes else int(
        torch.unique(torch.cat([first, last])).numel() * page_bytes
    )
