# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uintptr_t

# Where an arena lies, for what happens to it in a fork.
cdef struct place:
    uintptr_t address
    size_t size_bytes
    void **held      # NULL, or points to what is not NULL while somebody uses the bytes
    place *older
    place *younger


cdef unsigned long count_of_forks() noexcept

cdef class Arena:
    cdef void *mapping          # owned
    cdef size_t mapping_bytes
    cdef readonly unsigned long long address
    cdef readonly size_t size_bytes
    cdef place place
    cdef unsigned long process  # count of forks when it was made

    cdef void set_held(self, void **held) noexcept
    cdef void give_back(self) noexcept
