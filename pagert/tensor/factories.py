# SPDX-License-Identifier: Apache-2.0
"""Operators that make a new tensor after the model of a paged one: the new one is paged as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert._core.operation import Operation
from pagert._core.pump import OVERWRITE
from pagert.errors import OutOfFrames
from pagert.geometry import is_dense

from . import copying

if TYPE_CHECKING:
    from .region_tensor import RegionTensor
    from .traits import Traits

__all__ = ["run_assign", "run_copy", "run_filled", "run_zeros"]


def _like(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> RegionTensor | None:
    """Reserve the result of a factory, or return None where it is asked for elsewhere."""
    base = arguments[0]
    if type(base) is not cls:
        return None
    runtime = base._runtime
    if options.get("pin_memory") or options.get("layout") not in (None, torch.strided):
        return None
    device = options.get("device")
    if device is not None and not _is_device(torch.device(device), runtime.device):
        return None
    template = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype, device="meta")
    described = traits.op(template, *arguments[1:], **{**options, **_on_meta(traits, options)})
    if described.numel() == 0:
        # Kernels for the meta device give some empty tensors other strides. An empty one costs nothing.
        template = torch.empty_strided(
            base.size(), base.stride(), dtype=base.dtype, device=runtime.device
        )
        described = traits.op(template, *arguments[1:], **options)
    stride = described.stride()
    preserves = options.get("memory_format") in (None, torch.preserve_format)
    if preserves and "memory_format" in traits.argument_names and is_dense(base.size(), base.stride()):
        stride = base.stride()  # kernels for the meta device change those of axes of length one
    return cls._reserve(runtime, described.size(), stride, described.dtype)


def _on_meta(traits: Traits, options: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = (
        {"device": torch.device("meta")} if "device" in traits.argument_names else {}
    )
    if options.get("generator") is not None:
        changed["generator"] = None
    return changed


def _is_device(asked: torch.device, compute: torch.device) -> bool:
    return asked.type == compute.type and asked.index in (None, compute.index)


def _plain(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    return cls._dispatcher.run(traits, arguments, options)


def run_zeros(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Return a tensor of zero pages:

    nothing is written. What `empty_like` promises is met as well.
    """
    result = _like(cls, traits, arguments, options)
    return _plain(cls, traits, arguments, options) if result is None else result


def run_filled(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Return a tensor filled where its pages lie, by the kernel that the operator itself uses."""
    result = _like(cls, traits, arguments, options)
    if result is None:
        return _plain(cls, traits, arguments, options)
    named = dict(zip(traits.argument_names, arguments, strict=False)) | dict(options)
    operation = Operation(cls, traits.name)
    operation.add(result, OVERWRITE)
    try:
        operation.pin()
    except OutOfFrames:
        _fill(result, traits.name.split(".")[1], named)  # by ranges
        return result
    try:
        _fill(operation.dense(result), traits.name.split(".")[1], named)
    finally:
        operation.end()
    return result


def _fill(dense: torch.Tensor, base: str, named: Mapping[str, Any]) -> None:
    generator = named.get("generator")
    if base in ("ones_like", "new_ones"):
        dense.fill_(1)
    elif base in ("full_like", "new_full"):
        dense.fill_(named["fill_value"])
    elif base == "rand_like":
        dense.uniform_(0, 1, generator=generator)
    elif base == "randn_like":
        dense.normal_(0, 1, generator=generator)
    else:
        high = named["high"]
        high = int(high) if isinstance(high, torch.Tensor) else high
        dense.random_(named.get("low", 0), high, generator=generator)


def run_copy(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Return a paged copy, converted where the caller asks for it: `clone`, `_to_copy`."""
    source = arguments[0]
    result = _like(cls, traits, arguments, options)
    if result is None:
        return _plain(cls, traits, arguments, options)
    if source.dtype == result.dtype and copying.is_never_written(source):
        return result
    copying.copy(cls, result, source, overwrite=True, name=traits.name)
    return result


def run_assign(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run `copy_`.

    The old bytes of a paged target are not fetched where all of them are written.
    """
    target, source = arguments[0], arguments[1]
    ordinary = (
        type(source) in (cls, torch.Tensor)
        and source.layout is torch.strided
        and not source.is_quantized
        and source.shape == target.shape
    )
    shared = type(target) is cls and type(source) is cls and target._region is source._region
    if not ordinary or shared or target.layout is not torch.strided:
        return _plain(cls, traits, arguments, options)
    non_blocking = arguments[2] if len(arguments) > 2 else options.get("non_blocking", False)
    # A source on another device could be refused by the kernel: the old bytes are kept then.
    overwrite = source.device == target.device
    copying.copy(
        cls, target, source, overwrite=overwrite, non_blocking=non_blocking, name=traits.name
    )
    return target
