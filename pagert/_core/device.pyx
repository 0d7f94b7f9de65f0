# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""The device that a pump serves: its memory, the host memory that it copies from, what copies, and its fences.

The pump knows arenas and an engine and asks nothing else of a device; the one that the CPU stands for is made here.
"""

from pagert._core.arena import MappedArena
from pagert._core.flash import CopyEngine
from pagert.errors import ConfigurationError

__all__ = ["CpuDevice", "Device", "Fence"]

cdef uint32_t MEMORY_DEPTH = 16   # copies in flight; each is cut among the copy threads anyway


cdef uint32_t frames_of(Arena arena, uint64_t page_bytes) except? 0:
    """Pages that an arena has room for; 0 without one."""
    if arena is None:
        return 0
    if page_bytes == 0 or arena.size_bytes % page_bytes:
        raise ConfigurationError(
            f"an arena of {arena.size_bytes} bytes is no whole number of pages of {page_bytes} bytes")
    return <uint32_t>(arena.size_bytes // page_bytes)


cdef class Fence:
    """A point in the work that a device was given. This one has always passed: the CPU's work is done at the return."""

    cpdef bint passed(self):
        """Whether all that was asked of the device before is done. Does not block."""
        return True


cdef Fence PASSED = Fence()


cdef class Device:
    """Two arenas, the engine between them, and fences.

    A kind of device fills the arenas in and overrides the methods. A device serves one pump, which closes it. Where
    requests never come back, the pump keeps it for good, because the arenas may still be written to.
    """

    cdef int take_engine(self, pagert_engine *engine) except -1:
        raise NotImplementedError

    cpdef Fence fence(self):
        """What passes when all is done that the device was asked to compute until now. Does not block."""
        raise NotImplementedError

    cpdef close(self):
        """Give back the engine and the memory. Nothing is in flight any more. Idempotent.

        The addresses of `arena` stay valid, since a storage was made of them; its contents are gone.
        """
        raise NotImplementedError


cdef class CpuDevice(Device):
    """Ordinary memory, and threads that copy. What it is asked to compute is done at once."""

    def __cinit__(self, *, size_t device_bytes, size_t host_bytes=0, int copy_threads=2):
        self.arena = MappedArena(device_bytes)
        if host_bytes:
            self.host_arena = MappedArena(host_bytes)
        self.copy_engine = CopyEngine(copy_threads)
        self.memory_depth = MEMORY_DEPTH

    cdef int take_engine(self, pagert_engine *engine) except -1:
        return self.copy_engine.take_engine(engine)

    cpdef Fence fence(self):
        return PASSED

    cpdef close(self):
        if self.copy_engine.closed:
            return
        self.copy_engine.give_engine_back()
        self.copy_engine.close()
        self.arena.give_back()
        self.host_arena = None
