# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint64_t, uintptr_t

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


cdef class Operation:
    cdef object __weakref__
    cdef object kind             # the paged tensor's class
    cdef object name             # the operator's, for messages
    cdef small_pin small
    cdef held_pin *held          # `small`, or owned memory where that is too small
    cdef Py_ssize_t room, count  # accesses
    cdef Py_ssize_t lent         # the access whose dense view is asked for next, most likely
    cdef bint overwrites         # some access gives up its old bytes
    cdef bint pinned
    cdef Pump pump               # of all operands; None before the first one, and with another runtime
    cdef object other_pump       # of another runtime
    cdef object other_pin        # what it gave
    cdef list tensors, footprints  # one for each access
    cdef list empty              # (operand without elements, what stands for it), or None
    cdef dict special            # by access: "guarded", "whole", then its dense view; or None

    cpdef int add(self, tensor, int mode, bint guarded=*, bint whole=*) except -1
    cpdef int collect(self, value, int mode) except -1
    cpdef int pin(self) except -1
    cpdef object dense(self, value)
    cpdef object leave(self, result)
    cpdef int end(self, fence=*) except -1
    cdef uint64_t pages_bytes(self)
    cdef uint64_t arena_bytes(self)
    cdef int pin_elsewhere(self) except -1
    cdef void prepare(self) noexcept
    cdef int hold(self) except -1
    cdef int grow(self) except -1
    cdef void let_go(self) noexcept
    cdef int add_empty(self, tensor) except -1
    cdef int meet(self, tensor, Footprint footprint) except -1
    cdef object runtime_of(self)
    cdef object lend(self, tensor)
    cdef object look(self, Py_ssize_t index)
    cdef object look_specially(self, Py_ssize_t index)
    cdef Py_ssize_t find(self, tensor) except -2
    cdef bint is_apart(self, result) except -1
    cdef object leave_alias(self, result)
    cdef Py_ssize_t find_alias(self, result) except -2
    cdef int keep_shared_bytes(self) except -1


cdef Operation begin(kind, name)
