# SPDX-License-Identifier: Apache-2.0
# Mirrors include/pagert/engine.h, flash.h and copy.h: same names, same order. Then the classes that
# own the engines; the pump takes their tables of functions.

from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from "pagert/engine.h" nogil:
    enum:
        PAGERT_REQUEST_FILL
        PAGERT_REQUEST_COPY
        PAGERT_REQUEST_READ
        PAGERT_REQUEST_WRITE

    ctypedef struct pagert_request:
        uint32_t kind
        int32_t result
        void *target
        const void *source
        uint64_t offset_bytes
        uint64_t size_bytes
        uint64_t failed_offset
        void *tag
        pagert_request *next

    ctypedef struct pagert_engine:
        void *context
        int event_fd
        int (*submit)(void *context, pagert_request *request) noexcept nogil
        int (*flush)(void *context) noexcept nogil
        int (*reap)(void *context, pagert_request **finished, int max) noexcept nogil

cdef extern from "pagert/flash.h" nogil:
    ctypedef struct pagert_flash:
        pass

    enum:
        PAGERT_BACKEND_AUTO
        PAGERT_BACKEND_IO_URING
        PAGERT_BACKEND_THREADS

    enum:
        PAGERT_DIRECT_AUTO
        PAGERT_DIRECT_REQUIRE
        PAGERT_DIRECT_OFF

    ctypedef struct pagert_flash_options:
        const char *folder
        uint64_t capacity_bytes
        uint32_t block_bytes
        uint32_t depth
        uint32_t request_bytes
        uint32_t backend
        uint32_t direct
        uint32_t reserve

    ctypedef struct pagert_flash_info:
        uint64_t capacity_bytes
        uint64_t free_bytes
        uint32_t block_bytes
        uint32_t depth
        uint32_t request_bytes
        uint32_t backend
        uint32_t direct
        uint32_t memory_alignment
        uint32_t offset_alignment
        uint32_t reserved
        int32_t uring_errno
        int32_t direct_errno
        uint64_t file_system

    int pagert_flash_open(const pagert_flash_options *options, pagert_flash **flash,
                          pagert_flash_info *info)
    pagert_engine pagert_flash_engine(pagert_flash *flash)
    void pagert_flash_close(pagert_flash *flash)
    uint32_t pagert_crc32c(uint32_t seed, const void *bytes, uint64_t size_bytes)
    int pagert_crc32c_is_hardware()

cdef extern from "pagert/copy.h" nogil:
    ctypedef struct pagert_copy:
        pass

    int pagert_copy_open(uint32_t thread_count, pagert_copy **copy)
    pagert_engine pagert_copy_engine(pagert_copy *copy)
    void pagert_copy_close(pagert_copy *copy)


# In flight at the disk: what an urgent fetch waits behind. Measured with bench/tiers.py, as parts of the best plain
# loop while the processors were busy: 32 MiB read 0.91 and write 0.79, 64 MiB 0.95 and 0.91, 128 MiB 1.05 and 1.05,
# 256 MiB 1.15 and 1.17. A disk that tells of many at once leaves their checksums for last: reads gain less.
cdef enum:
    FLASH_READ_BYTES = 128 << 20
    FLASH_WRITE_BYTES = 256 << 20


cdef class FlashFile:
    cdef pagert_flash *handle   # owned; NULL once closed
    cdef pagert_flash_info facts
    cdef readonly str folder
    cdef object lock            # of the blocking calls: the engine serves one thread at a time
    cdef bint taken             # the pump drives the engine; blocking calls are refused

    # The table for whoever drives the engine from now on. That one must be gone before close().
    cdef int take_engine(self, pagert_engine *engine) except -1
    cdef void give_engine_back(self) noexcept

    cdef int drive_all(self, pagert_request *requests, Py_ssize_t count) except -1
    cdef int move(self, uint32_t kind, object buffer, uint64_t offset_bytes) except -1

cdef class CopyEngine:
    cdef pagert_copy *handle    # likewise
    cdef readonly int thread_count
    cdef object lock
    cdef bint taken

    cdef int take_engine(self, pagert_engine *engine) except -1
    cdef void give_engine_back(self) noexcept
