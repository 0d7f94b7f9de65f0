# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint64_t

from pagert._core.pump cimport Region


cdef class Footprint:
    cdef object owner            # the region, which is `region` or that of another runtime; None: no bytes
    cdef Region region           # None where another runtime brings regions of its own
    cdef object geometry         # a plain tensor over the region's storage, or None before its first view
    cdef bint measured           # whether the range is known
    cdef uint64_t offset_bytes, size_bytes
    cdef uint64_t device_bytes   # where `dense` looks
    cdef object dense            # the dense view of the last call, or None

    # The last view, for the next time that it is asked for: a layer looks at its weights always alike.
    cdef object view             # a footprint, or a list of them
    cdef object view_of_operator
    cdef tuple view_numbers
    cdef int depth               # 0: not known as a view of another footprint

    cdef int measure(self, tensor) except -1


cdef Footprint footprint_of(tensor)
cdef object geometry_of(tensor)
