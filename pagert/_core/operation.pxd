# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint64_t

from pagert._core.core cimport pagert_access
from pagert._core.pump cimport Pump, Region, held_pin

cdef enum:
    OPERANDS_IN_PLACE = 8


# A pin with room for the accesses of most operators.
cdef struct small_pin:
    held_pin held
    pagert_access more[OPERANDS_IN_PLACE - 1]


cdef class Turn:
    cdef Pump pump
    cdef object lock


cdef class Footprint:
    cdef Region region
    cdef object geometry         # a plain tensor over the region's storage, or None before its first view
    cdef bint measured           # whether the range is known
    cdef uint64_t offset_bytes, size_bytes
    cdef uint64_t device_bytes   # where `dense` looks
    cdef object dense            # the dense view of the last call, or None

    # The last view, for the next time that it is asked for: a layer looks at its weights always alike.
    cdef object view             # a footprint, or a list of them
    cdef object view_plan
    cdef tuple view_numbers
    cdef int depth               # 0: not known as a view of another footprint

    cdef int measure(self, tensor) except -1


cdef class Operation:
    cdef small_pin small
    cdef held_pin *held          # `small`, or owned memory where that is too small
    cdef Py_ssize_t room, count  # accesses
    cdef Py_ssize_t lent         # dense views that were handed out
    cdef bint pinned
    cdef Pump pump               # of all operands; None before the first one
    cdef list tensors, footprints

    cdef int grow(self) except -1
    cdef bint pin(self) except -1
    cdef void let_go(self) noexcept
    cdef uint64_t pages_bytes(self)
    cdef bint is_apart(self, object result) except -1
