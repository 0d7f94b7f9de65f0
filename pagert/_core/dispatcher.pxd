# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint64_t

from pagert._core.footprint cimport Footprint
from pagert._core.operation cimport Operation


cdef enum:
    RUN    # pin the operands, run on dense views, let go
    SMALL  # likewise where the operands are small; else its route
    VIEW   # another look at the same bytes
    ROUTE  # its route


cdef class Handling:
    cdef public str name
    cdef public int way
    cdef public object call
    cdef public frozenset written
    cdef public object gradients, overwrites
    cdef public bint whole, product
    cdef public object route, stream


cdef class Dispatcher:
    cdef object kind
    cdef dict known
    cdef object analyse
    cdef uint64_t parts

    cpdef object run(self, Handling how, args, kwargs=*, call=*)
    cdef Operation collect(self, Handling how, args, kwargs)
    cdef Operation collect_rare(self, Handling how, args, kwargs)
    cdef object carry_out(self, Operation operation, args, kwargs, call)
    cdef bint outgrows(self, Operation operation, args) except -1
    cdef object view(self, Handling how, args, kwargs)
    cdef object wrap(self, tensor, Footprint footprint)
