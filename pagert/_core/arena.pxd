# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uintptr_t

# Where a mapped arena lies, for what happens to it in a fork.
cdef struct mapped_range:
    uintptr_t address
    size_t size_bytes
    void **held      # NULL, or points to what is not NULL while somebody uses the bytes
    mapped_range *older
    mapped_range *younger


cdef unsigned long count_of_forks() noexcept

cdef class Arena:
    cdef readonly unsigned long long address
    cdef readonly size_t size_bytes

    cdef void set_held(self, void **held) noexcept
    cdef void give_back(self) noexcept

cdef class MappedArena(Arena):
    cdef void *mapping          # owned
    cdef size_t mapping_bytes
    cdef mapped_range range
    cdef unsigned long process  # count of forks when it was made
