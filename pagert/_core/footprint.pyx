# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""Where a tensor's bytes are in its region, and what was made of that at its last call."""

cimport cython
from libc.stdint cimport uint64_t

from pagert._core.pump cimport Region

import torch

__all__ = ["Footprint", "geometry"]

# What a view of a geometry is made below: autograd's two layers, or it would know the tensor as its base.
cdef object below_autograd = torch._C._AutoDispatchBelowAutograd
cdef object exclude = torch._C._ExcludeDispatchKeyGuard
cdef object view_tracking = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
cdef object no_dispatch = torch._C._DisableTorchDispatch
cdef object alias = torch.ops.aten.alias.default


@cython.final
@cython.no_gc
cdef class Footprint:
    """A tensor's bytes in its region, and the dense view of its last call.

    The dense view is used again while the pages lie at the same address. It is looked at only while they
    are pinned, so it is never stale. Tensors of one geometry in one region may share a footprint.
    """

    cdef int measure(self, tensor) except -1:
        """Find the range that a tensor of this geometry touches."""
        cdef uint64_t item_bytes = tensor.itemsize
        cdef uint64_t last = 0
        cdef uint64_t length
        if self.owner is None:
            self.size_bytes = 0
        elif tensor.is_contiguous():
            self.size_bytes = <uint64_t>tensor.numel() * item_bytes
        elif tensor.numel() == 0:
            self.size_bytes = 0
        else:
            for length, step in zip(<tuple>tensor.size(), <tuple>tensor.stride()):
                last += (length - 1) * <uint64_t>step
            self.size_bytes = (last + 1) * item_bytes
        self.offset_bytes = <uint64_t>tensor.storage_offset() * item_bytes
        self.measured = True
        return 0


cdef Footprint footprint_of(tensor):
    """The footprint of a tensor, made at its first use."""
    cdef Footprint found = tensor._footprint
    if found is None:
        found = Footprint.__new__(Footprint)
        found.owner = tensor._region
        if isinstance(found.owner, Region):
            found.region = found.owner
        tensor._footprint = found
    return found


cdef object geometry_of(tensor):
    with below_autograd(), exclude(view_tracking), no_dispatch():
        return alias(tensor)


def geometry(tensor):
    """Return a plain tensor of the same geometry over the same storage, which has no memory.

    View kernels of PyTorch work on it without a dispatch to this package. It never gets out.
    """
    return geometry_of(tensor)
