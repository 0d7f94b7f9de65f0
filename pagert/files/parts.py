# SPDX-License-Identifier: Apache-2.0
"""A tensor, paged or plain, in parts of a limited size, each with its place in row-major order.

A file holds elements in row-major order, memory in the order of the strides. A part is cut along
memory, so that its pages are few and lie side by side, and says where in the file its rows belong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pagert.geometry import contiguous_stride
from pagert.tensor import PagedTensor

__all__ = ["PART_BYTES_MAX", "Part", "Staging", "part_bytes", "parts"]

# What a save or a load holds outside of pages. Disks gain little from larger requests.
PART_BYTES_MAX = 4 * 2**20


class Part(NamedTuple):
    """Some elements of a tensor, and where their runs begin in the tensor's row-major order."""

    view: torch.Tensor
    run_starts: Iterator[int]
    run_length: int


def part_bytes(tensor: torch.Tensor) -> int:
    """Say how much of `tensor` is moved at once: of a paged one, an eighth of the device tier."""
    if type(tensor) is not PagedTensor:
        return PART_BYTES_MAX
    runtime = tensor._runtime
    pages = runtime.storage.nbytes() // 8 // runtime.page_bytes
    return min(PART_BYTES_MAX, max(1, pages) * runtime.page_bytes)


def parts(tensor: torch.Tensor, length_max: int) -> Iterator[Part]:
    """Cut a tensor into parts of at most `length_max` elements; their views write through to it."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        flat = torch.ops.aten.as_strided.default(
            tensor, (tensor.numel(),), (1,), tensor.storage_offset()
        )
        for start in range(0, tensor.numel(), length_max):
            view = flat[start : start + length_max]
            yield Part(view, iter((start,)), view.numel())
        return
    outermost_first = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    for starts, lengths in _boxes((0,) * tensor.dim(), tensor.shape, outermost_first, length_max):
        view = tensor
        for axis, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            view = view.narrow(axis, start, length)
        yield Part(view, *_runs(starts, lengths, tensor.shape))


def _boxes(
    starts: Sequence[int], lengths: Sequence[int], axes: Sequence[int], length_max: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    count = math.prod(lengths)
    if count <= length_max or not axes:
        yield starts, lengths
        return
    axis, whole = axes[0], lengths[axes[0]]
    step = max(1, length_max * whole // count)
    for first in range(0, whole, step):
        yield from _boxes(
            [*starts[:axis], starts[axis] + first, *starts[axis + 1 :]],
            [*lengths[:axis], min(step, whole - first), *lengths[axis + 1 :]],
            axes[1:],
            length_max,
        )


def _runs(
    starts: Sequence[int], lengths: Sequence[int], shape: Sequence[int]
) -> tuple[Iterator[int], int]:
    """Find where the rows of a box begin in the row-major order of `shape`, and their length."""
    stride = contiguous_stride(shape)
    inner = len(shape)  # from this axis on, the box has everything
    while inner > 0 and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)
    origin = sum(start * step for start, step in zip(starts, stride, strict=True))
    outer = [
        range(0, length * step, step)
        for length, step in zip(lengths[:inner], stride[:inner], strict=True)
    ]
    run_starts = (origin + sum(offsets) for offsets in itertools.product(*outer))
    return run_starts, math.prod(lengths[inner:])


class Staging:
    """Plain memory between pages and a file. One part at a time lies in it, in row-major order."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def like(self, view: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
        """Return a tensor of the shape of `view` and its bytes; both valid until the next call."""
        size_bytes = view.numel() * dtype.itemsize
        if self._bytes.numel() < size_bytes:
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8)
        used = self._bytes[:size_bytes]
        return used.view(dtype).view(view.shape), used.numpy().data
