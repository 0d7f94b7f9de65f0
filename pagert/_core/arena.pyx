# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""Memory for the frames of a tier, and what becomes of it in a forked child.

A child has neither the pump's thread nor the rings, and must not double the arenas by copying on write: it
gets no arena at all, unless an operator or a resident() block holds some of it at that moment. Then the
plain tensors that look at it stay valid in the child too.
"""

from libc.errno cimport errno
from libc.stdint cimport uintptr_t
from cpython.buffer cimport PyBuffer_FillInfo

import os

__all__ = ["Arena", "MappedArena", "format_size"]

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *address, size_t length, int protection, int flags, int fd, long offset)
    int munmap(void *address, size_t length)
    int madvise(void *address, size_t length, int advice)
    const int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
    const int MADV_HUGEPAGE, MADV_DONTNEED, MADV_DONTFORK, MADV_DOFORK
    void *MAP_FAILED

cdef size_t HUGE_PAGE_BYTES = 2 << 20

cdef unsigned long forks = 0
cdef mapped_range *youngest = NULL  # of the arenas of this process


cdef unsigned long count_of_forks() noexcept:
    """Differs between a process and the child that it forks, where everything else is the same."""
    return forks


def _before_fork():
    cdef mapped_range *one = youngest
    while one:
        madvise(<void *>one.address, one.size_bytes,
                MADV_DOFORK if one.held and one.held[0] else MADV_DONTFORK)
        one = one.older


def _after_fork_in_child():
    global forks, youngest
    forks += 1
    youngest = NULL


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def format_size(size_bytes):
    """Return a size as text for messages, for example '12 MiB'."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} bytes"


cdef class Arena:
    """A run of addresses for frames, whatever memory lies behind them. Each kind of memory is a subclass."""

    cdef void set_held(self, void **held) noexcept:
        """Say where to look, at a fork, whether somebody uses the bytes. NULL: nobody does."""

    cdef void give_back(self) noexcept:
        """Drop the contents. The addresses stay valid for the storage that was made of them."""


cdef class MappedArena(Arena):
    """Anonymous memory for frames: aligned to 2 MiB and backed by huge pages where the kernel has them.

    Where the bytes lie decides the speed of direct I/O: scattered OS pages split every request. Memory is
    taken when it is first touched. Exposes a writable buffer of bytes.
    """

    def __cinit__(self, size_t size_bytes):
        global youngest
        self.mapping_bytes = size_bytes + HUGE_PAGE_BYTES
        self.mapping = mmap(NULL, self.mapping_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if self.mapping == MAP_FAILED:
            self.mapping = NULL
            raise MemoryError(f"cannot map {format_size(size_bytes)} for a tier: {os.strerror(errno)}; "
                              "lower device_bytes or host_bytes")
        self.address = (<uintptr_t>self.mapping + HUGE_PAGE_BYTES - 1) & ~(HUGE_PAGE_BYTES - 1)
        self.size_bytes = size_bytes
        self.process = forks
        madvise(<void *><uintptr_t>self.address, size_bytes, MADV_HUGEPAGE)  # refused: ordinary OS pages
        self.range.address = self.address
        self.range.size_bytes = size_bytes
        self.range.older = youngest
        if youngest:
            youngest.younger = &self.range
        youngest = &self.range

    def __dealloc__(self):
        global youngest
        # In a forked child it is in no list, and something else may lie at its address by now.
        if not self.mapping or self.process != forks:
            return
        if self.range.older:
            self.range.older.younger = self.range.younger
        if self.range.younger:
            self.range.younger.older = self.range.older
        else:
            youngest = self.range.older
        munmap(self.mapping, self.mapping_bytes)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void *><uintptr_t>self.address, self.size_bytes, 0, flags)

    cdef void set_held(self, void **held) noexcept:
        self.range.held = held

    cdef void give_back(self) noexcept:
        if self.process == forks:
            madvise(<void *><uintptr_t>self.address, self.size_bytes, MADV_DONTNEED)
