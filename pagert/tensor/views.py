# SPDX-License-Identifier: Apache-2.0
"""Operators that only look at the same bytes in another way. They pin nothing and move nothing.

A paged tensor is a tensor over a storage without memory, as long as its region. PyTorch's own view
kernels therefore compute the geometry, check the bounds and share the storage; only the dispatch to
this package is switched off while they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert.errors import UnsupportedOperator
from pagert.geometry import byte_range, contiguous_stride, describe, extent

if TYPE_CHECKING:
    from .region_tensor import RegionTensor
    from .traits import Traits

__all__ = ["run_composite", "run_reshape", "run_resize", "run_view"]


def run_view(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Return paged views of the region of the first argument."""
    base = arguments[0]
    if type(base) is not cls:  # the view is of a plain tensor, and a paged one lends only its shape
        with torch._C._DisableTorchDispatch():
            return traits.op(*arguments, **options)
    with torch._C._DisableTorchDispatch():
        geometry = traits.op(*arguments, **options)
        return _paged(cls, base, geometry)


def _paged(cls: type[RegionTensor], base: RegionTensor, geometry: Any) -> Any:
    if geometry is base:
        return base
    if isinstance(geometry, torch.Tensor):
        return cls._wrap(geometry, base._region, base._runtime)
    return type(geometry)([_paged(cls, base, item) for item in geometry])


def run_reshape(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Change the geometry of the first argument itself: `t_`, `squeeze_`, `as_strided_`, ..."""
    arguments[0]._footprint = None
    with torch._C._DisableTorchDispatch():
        traits.op(*arguments, **options)
    return arguments[0]


def run_resize(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Resize within the bytes that the region has; an empty tensor gets a region of its own."""
    tensor, template = arguments[0], arguments[1]
    size = tuple(template.shape) if isinstance(template, torch.Tensor) else tuple(template)
    if type(tensor) is not cls:  # resize_as_ of a plain tensor
        with torch._C._DisableTorchDispatch():
            return traits.op(*arguments, **options)
    memory_format = options.get("memory_format")
    if memory_format is None or memory_format is torch.preserve_format:
        stride = contiguous_stride(size)
    else:
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    needed_bytes = (tensor.storage_offset() + extent(size, stride)) * tensor.itemsize
    if needed_bytes <= torch._C.TensorBase.untyped_storage(tensor).nbytes():
        tensor._footprint = None
        with torch._C._DisableTorchDispatch():
            torch.ops.aten.as_strided_.default(tensor, size, stride, tensor.storage_offset())
        return tensor
    if byte_range(tensor)[1] == 0 and tensor._region is None:
        tensor._rebind(cls._reserve(tensor._runtime, size, stride, tensor.dtype))
        return tensor
    raise UnsupportedOperator(
        f"{traits.name}: a paged tensor of {describe(tensor)} cannot grow to {size}, its region "
        "has a fixed size; make a new tensor and copy into it"
    )


def run_composite(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run the operators that this one consists of; each comes back to the dispatch by itself."""
    return traits.op.decompose(*arguments, **options)
