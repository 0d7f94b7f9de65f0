# SPDX-License-Identifier: Apache-2.0
"""Copies between paged and plain tensors, by ranges: no tensor need fit the device tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pagert._core.operation import Operation
from pagert._core.pump import OVERWRITE, READ, UPDATE
from pagert.errors import OutOfFrames
from pagert.geometry import byte_range, fills_range, is_dense

from .moving import move
from .ranges import COPIES_IN_DEVICE, cut, flat, same_order, share_bytes

if TYPE_CHECKING:
    from .region_tensor import RegionTensor

__all__ = ["copy", "is_never_written", "load", "page"]


def copy(
    cls: type[RegionTensor],
    target: torch.Tensor,
    source: torch.Tensor,
    *,
    overwrite: bool,
    non_blocking: bool = False,
    name: str = "aten.copy_.default",
) -> None:
    """Copy `source` into `target`, of which at least one is paged.

    With `overwrite`, the old bytes of `target` are given up at once: the caller has made sure that
    the copy cannot fail for its shapes. Elements are converted and placed as `copy_` does it, so
    that a copy by ranges is bitwise the same as a whole one.
    """
    shared = type(target) is cls and type(source) is cls and target._region is source._region
    mode = OVERWRITE if overwrite and not shared and fills_range(target) else UPDATE
    if cls._dispatcher.copy(target, source, mode, non_blocking):
        return
    paged = [tensor for tensor in (target, source) if type(tensor) is cls]
    runtime: Any = paged[0]._runtime
    range_bytes = share_bytes(runtime, COPIES_IN_DEVICE)
    if sum(byte_range(tensor)[1] for tensor in paged) > 2 * range_bytes and same_order(
        [target, source]
    ):
        step = max(1, range_bytes // max(target.itemsize, source.itemsize))
        flat_target, flat_source = flat(target), flat(source)
        for start, stop in cut(target.numel(), step):
            _copy_whole(
                cls,
                flat_target[start:stop],
                flat_source[start:stop],
                mode,
                non_blocking,
                name,
            )
    else:
        _copy_whole(cls, target, source, mode, non_blocking, name)


def _copy_whole(
    cls: type[RegionTensor],
    target: torch.Tensor,
    source: torch.Tensor,
    mode: int,
    non_blocking: bool,
    name: str,
) -> None:
    operation = Operation(cls, name)
    operation.collect(target, mode)
    operation.collect(source, READ)
    try:
        operation.pin()
    except OutOfFrames as error:
        if error.needed_bytes is None or error.needed_bytes <= (error.capacity_bytes or 0):
            raise
        move(cls, target, source, name)
        return
    try:
        operation.dense(target).copy_(operation.dense(source), non_blocking)
    finally:
        operation.end()


def is_never_written(tensor: RegionTensor) -> bool:
    """Tell whether every page of `tensor` is still zero, and its values are plain zeros."""
    if tensor.is_neg() or tensor.is_conj():
        return False  # zeros with a sign
    offset_bytes, size_bytes = byte_range(tensor)
    if tensor._region is None or size_bytes == 0:
        return True
    tensor._region.settle()
    return not any(tensor._runtime.pump.locate(tensor._region, offset_bytes, size_bytes)[1:])


def page(
    cls: type[RegionTensor],
    runtime: Any,
    source: torch.Tensor,
    dtype: torch.dtype | None = None,
    refuse_readers: bool = True,
) -> RegionTensor:
    """Return a paged copy of a strided tensor. Dense layouts are kept."""
    stride = source.stride() if fills_range(source) else None
    target = cls._reserve(runtime, source.size(), stride, dtype or source.dtype, refuse_readers)
    if target._region is not None:
        if source.requires_grad:
            source = source.detach()
        copy(cls, target, source, overwrite=True, name="pagert.tensor")
    return target


def load(cls: type[RegionTensor], tensor: RegionTensor) -> torch.Tensor:
    """Return a plain copy on the compute device. A dense layout is kept."""
    if is_dense(tensor.size(), tensor.stride()):
        plain = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    else:
        plain = torch.empty(tensor.size(), dtype=tensor.dtype, device=tensor.device)
    if is_never_written(tensor):
        return plain.zero_()
    with torch.no_grad():
        copy(cls, plain, tensor, overwrite=False)
    return plain
