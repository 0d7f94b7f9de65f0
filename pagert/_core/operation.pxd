# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint64_t

from pagert._core.core cimport pagert_access
from pagert._core.footprint cimport Footprint
from pagert._core.pump cimport Pump, held_pin

cdef enum:
    OPERANDS_IN_PLACE = 8


# A pin with room for the accesses of most operators.
cdef struct small_pin:
    held_pin held
    pagert_access more[OPERANDS_IN_PLACE - 1]


cdef class Turn:
    cdef Pump pump
    cdef object lock


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
    cdef object attempt(self)
    cdef object explain(self, error)
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
