# SPDX-License-Identifier: Apache-2.0
"""A tensor over a region of a pager's address space: what it is made of, and how one is made.

It is a tensor over a storage that has a size and no memory. The storage stands for the region: all views of one
region share it, as views of a plain tensor share theirs. What operators do with it is said above, in
`pagert.tensor.dispatch`, and what users do with it in `pagert.tensor.paged_tensor`, whose class is the only one
that is ever instantiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from pagert._core.footprint import geometry
from pagert.geometry import contiguous_stride, extent

from .unreadable import refuse_addresses

if TYPE_CHECKING:
    from pagert._core.dispatcher import Dispatcher
    from pagert._core.footprint import Footprint
    from pagert._core.pump import Region
    from pagert.runtime import Runtime

__all__ = ["RegionTensor", "over_storage"]

# PyTorch's own attribute, below the property of the same name.
_DATA: Any = torch._C.TensorBase.data

_Self = TypeVar("_Self", bound="RegionTensor")


class RegionTensor(torch.Tensor):
    """A tensor whose bytes are a range of a region."""

    _region: Region | None  # None: no bytes
    _runtime: Runtime
    _footprint: Footprint | None = None  # its bytes in the region; of this geometry only
    _dispatcher: ClassVar[Dispatcher]

    @classmethod
    def _reserve(
        cls: type[_Self],
        runtime: Runtime,
        size: Sequence[int],
        stride: Sequence[int] | None,
        dtype: torch.dtype,
        refuse_readers: bool = True,
    ) -> _Self:
        """Reserve a region and return the tensor that covers it. Its pages are zero.

        Whoever asks its storage for an address gets an exception, to read only with `refuse_readers`.
        """
        if stride is None:
            stride = contiguous_stride(size)
        size_bytes = extent(size, stride) * dtype.itemsize
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=dtype, device=runtime.device
        )
        tensor._region = runtime.pump.reserve(size_bytes) if size_bytes else None
        tensor._runtime = runtime
        if size_bytes:
            refuse_addresses(tensor, refuse_readers)
        return tensor

    @classmethod
    def _wrap(
        cls: type[_Self], geometry: torch.Tensor, region: Region | None, runtime: Runtime
    ) -> _Self:
        """Return a paged tensor of the geometry of `geometry`, which shares a region's storage."""
        tensor = torch.Tensor._make_subclass(cls, geometry)
        tensor._region = region
        tensor._runtime = runtime
        return tensor

    @classmethod
    def _view(cls: type[_Self], owner: RegionTensor, like: torch.Tensor, offset: int) -> _Self:
        """Return a view of the owner's region at element `offset`, with the geometry of `like`."""
        geometry = over_storage(owner, like.dtype, like.size(), like.stride(), offset)
        torch._C._set_neg(geometry, like.is_neg())
        if like.is_complex():
            torch._C._set_conj(geometry, like.is_conj())
        return cls._wrap(geometry, owner._region, owner._runtime)

    def _rebind(self, other: RegionTensor) -> None:
        """Become another look at the bytes of `other`. The object, history and version stay."""
        _DATA.__set__(self, other)
        self._region = other._region
        self._runtime = other._runtime
        self._footprint = None


def over_storage(
    tensor: RegionTensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Return a plain tensor of any geometry over the storage of `tensor`, which has no memory.

    `set_` would ask for the address of the bytes, which are refused to every reader.
    """
    found = geometry(tensor)
    with torch.inference_mode(False), torch.no_grad():
        if dtype != tensor.dtype:
            torch._C._set_neg(found, False)
            if found.is_complex():
                torch._C._set_conj(found, False)
            size_bytes = torch._C.TensorBase.untyped_storage(tensor).nbytes()
            whole = found.as_strided((size_bytes // found.itemsize,), (1,), 0).view(torch.uint8)
            found = whole[: size_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return found.as_strided(size, stride, offset)
