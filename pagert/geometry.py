# SPDX-License-Identifier: Apache-2.0
"""Sizes, strides and the bytes they touch. Nothing here reads a tensor's data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagert.sizes import format_bytes


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Count the elements from the first one touched to the last one, both included."""
    last = 0
    for length, step in zip(size, stride, strict=True):
        if length == 0:
            return 0
        last += (length - 1) * step
    return last + 1


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offset in its storage and the length of the bytes that `tensor` touches."""
    item_bytes = tensor.itemsize
    if tensor.is_contiguous():
        element_count = tensor.numel()
    else:
        element_count = extent(tensor.size(), tensor.stride())
    return int(tensor.storage_offset()) * item_bytes, element_count * item_bytes


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether the elements fill their range without a hole and without meeting each other."""
    expected = 1
    for step, length in sorted(zip(stride, size, strict=True)):
        if length == 0:
            return True
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True


def fills_range(tensor: torch.Tensor) -> bool:
    """Tell whether writing every element of `tensor` writes every byte of its range."""
    return tensor.is_contiguous() or is_dense(tensor.size(), tensor.stride())


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    stride = [1] * len(size)
    for axis in range(len(size) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * max(size[axis + 1], 1)
    return tuple(stride)


def describe(tensor: torch.Tensor) -> str:
    """Write shape, dtype and bytes of `tensor` for a message, without touching its data."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = "(" + ", ".join(map(str, tensor.shape)) + ("," if tensor.dim() == 1 else "") + ")"
    return f"{shape} {dtype}, {format_bytes(byte_range(tensor)[1])}"
