# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint64_t

from pagert._core.pump cimport Region


cdef class Footprint:
    cdef Region region
    cdef uint64_t offset_bytes, size_bytes
    cdef uint64_t device_bytes   # where `dense` looks
    cdef object dense            # the dense view of the last call, or None
