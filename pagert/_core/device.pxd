# SPDX-License-Identifier: Apache-2.0
# The device that a pump serves: see device.pyx.

from libc.stdint cimport uint32_t, uint64_t

from pagert._core.arena cimport Arena
from pagert._core.flash cimport CopyEngine, pagert_engine

cdef uint32_t frames_of(Arena arena, uint64_t page_bytes) except? 0

cdef class Fence:
    cpdef bint passed(self)

cdef class Device:
    cdef readonly Arena arena        # the device tier's frames; its addresses outlive close()
    cdef readonly Arena host_arena   # the host tier's, or None
    cdef uint32_t memory_depth       # requests in flight at the memory engine at once

    # The engine of FILL and COPY between the arenas, for the one who drives it from now on, until `close()`.
    cdef int take_engine(self, pagert_engine *engine) except -1
    cpdef Fence fence(self)
    cpdef close(self)

cdef class CpuDevice(Device):
    cdef CopyEngine copy_engine
