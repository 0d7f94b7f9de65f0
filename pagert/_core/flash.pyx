# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""The engines as Python objects: each class owns one handle.

The pump takes their tables of functions; the blocking calls here are for tests and benchmarks.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.errno cimport EAGAIN, EBADMSG, EINVAL, ENODATA, ENOMEM, EPERM
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, strerror

import threading

__all__ = ["CopyEngine", "FlashFile", "crc32c", "crc32c_is_hardware"]

cdef extern from "poll.h" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *descriptors, unsigned long count, int timeout_ms)
    const short POLLIN

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size_bytes)

cdef enum:
    REAP_MAX = 64

cdef dict BACKENDS = {
    "auto": PAGERT_BACKEND_AUTO,
    "io_uring": PAGERT_BACKEND_IO_URING,
    "threads": PAGERT_BACKEND_THREADS,
}
cdef dict DIRECT = {
    "auto": PAGERT_DIRECT_AUTO,
    "require": PAGERT_DIRECT_REQUIRE,
    "off": PAGERT_DIRECT_OFF,
}
cdef dict KINDS = {
    "fill": PAGERT_REQUEST_FILL,
    "copy": PAGERT_REQUEST_COPY,
    "read": PAGERT_REQUEST_READ,
    "write": PAGERT_REQUEST_WRITE,
}


cdef str reason(int code):
    return strerror(-code).decode("utf-8", "replace")


cdef int take_up_to_full(pagert_engine *engine, pagert_request *requests, Py_ssize_t *taken,
                         Py_ssize_t count) noexcept nogil:
    """Submit until the queue is full. 0 or -errno."""
    cdef int code = 0
    while taken[0] < count:
        code = engine.submit(engine.context, &requests[taken[0]])
        if code:
            break
        taken[0] += 1
    if code == -EAGAIN:
        code = 0
    if code:
        return code
    return engine.flush(engine.context)


cdef int wait_and_reap(pagert_engine *engine) noexcept nogil:
    """Wait up to a tenth of a second. How many requests came back, or -errno."""
    cdef pagert_request *finished[REAP_MAX]
    cdef pollfd descriptor
    descriptor.fd = engine.event_fd
    descriptor.events = POLLIN
    descriptor.revents = 0
    poll(&descriptor, 1, 100)
    return engine.reap(engine.context, finished, REAP_MAX)


cdef void wait_for(pagert_engine *engine, Py_ssize_t count) noexcept nogil:
    cdef int reaped
    while count > 0:
        reaped = wait_and_reap(engine)
        if reaped < 0:
            return
        count -= reaped


cdef int drive(pagert_engine *engine, pagert_request *requests, Py_ssize_t count) except -1 nogil:
    """Run requests to their end, without the GIL. What a signal handler raises (Ctrl-C) ends it
    early, but never before the requests in flight are back: the kernel writes to their buffers."""
    cdef Py_ssize_t taken = 0, given_back = 0
    cdef int code = 0, reaped
    while given_back < count and not code:
        code = take_up_to_full(engine, requests, &taken, count)
        if code:
            break
        reaped = wait_and_reap(engine)
        if reaped < 0:
            code = reaped
        elif reaped:
            given_back += reaped
        else:
            with gil:
                try:
                    PyErr_CheckSignals()
                except BaseException:
                    with nogil:
                        wait_for(engine, taken - given_back)
                    raise
    if code:
        wait_for(engine, taken - given_back)
        with gil:
            raise OSError(-code, reason(code))
    return 0


cdef class Batch:
    """Requests and the buffers that they point to, held until all have come back."""

    cdef pagert_request *requests
    cdef Py_buffer *buffers
    cdef Py_ssize_t count, buffer_count

    def __cinit__(self, Py_ssize_t count):
        self.count = count
        self.requests = <pagert_request *>PyMem_Calloc(max(count, 1), sizeof(pagert_request))
        self.buffers = <Py_buffer *>PyMem_Calloc(max(2 * count, 1), sizeof(Py_buffer))
        if not self.requests or not self.buffers:
            raise MemoryError

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.buffer_count):
            PyBuffer_Release(&self.buffers[i])
        PyMem_Free(self.buffers)
        PyMem_Free(self.requests)

    cdef Py_buffer *hold(self, object target, bint writable) except NULL:
        cdef Py_buffer *buffer = &self.buffers[self.buffer_count]
        PyObject_GetBuffer(target, buffer, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.buffer_count += 1
        return buffer

    cdef list results(self):
        cdef Py_ssize_t i
        return [(self.requests[i].result, self.requests[i].failed_offset)
                for i in range(self.count)]


cdef class FlashFile:
    """One private, nameless file on flash. `pagert.engines.open_flash` checks its options.

    Raises `OSError` with `errno` and `filename` (the folder) where it cannot be opened.
    """

    def __cinit__(self, str folder, *, capacity_bytes, block_bytes, depth=0, request_bytes=0,
                  str backend="auto", str direct="auto", bint reserve=True):
        cdef pagert_flash_options options
        cdef bytes path = folder.encode("utf-8", "surrogateescape")
        cdef int code
        if b"\0" in path:
            raise ValueError(f"folder {folder!r} contains a null byte")
        options.folder = path
        options.capacity_bytes = capacity_bytes
        options.block_bytes = block_bytes
        options.depth = depth
        options.request_bytes = request_bytes
        options.backend = BACKENDS[backend]
        options.direct = DIRECT[direct]
        options.reserve = reserve
        self.folder = folder
        self.lock = threading.Lock()
        with nogil:
            code = pagert_flash_open(&options, &self.handle, &self.facts)
        if code:
            self.handle = NULL
            raise OSError(-code, reason(code), folder)

    def __dealloc__(self):
        if self.handle:
            pagert_flash_close(self.handle)

    @property
    def closed(self):
        return self.handle == NULL

    @property
    def info(self):
        cdef dict facts = self.facts
        facts["backend"] = (
            "io_uring" if self.facts.backend == PAGERT_BACKEND_IO_URING else "threads")
        facts["direct"] = bool(self.facts.direct)
        facts["reserved"] = bool(self.facts.reserved)
        return facts

    cdef int take_engine(self, pagert_engine *engine) except -1:
        if not self.handle:
            raise ValueError("the flash file is closed")
        if self.taken:
            raise ValueError("the flash file belongs to a pump already")
        with self.lock:
            self.taken = True
        engine[0] = pagert_flash_engine(self.handle)
        return 0

    cdef void give_engine_back(self) noexcept:
        self.taken = False

    def run(self, requests):
        """Run `(kind, buffer, offset)` with kind "read" or "write", all at once. Blocks.

        Returns `(result, failed_offset)` of each. Buffers must be aligned to
        `info["memory_alignment"]`, offsets and sizes to blocks; else the result is -EINVAL."""
        cdef list wanted = list(requests)
        cdef Batch batch = Batch(len(wanted))
        cdef Py_buffer *buffer
        cdef pagert_request *request
        cdef Py_ssize_t i
        for i in range(batch.count):
            kind, target, offset = wanted[i]
            request = &batch.requests[i]
            request.kind = KINDS[kind]
            buffer = batch.hold(target, kind == "read")
            request.target = buffer.buf
            request.source = buffer.buf
            request.offset_bytes = offset
            request.size_bytes = buffer.len
        self.drive_all(batch.requests, batch.count)
        return batch.results()

    cdef int drive_all(self, pagert_request *requests, Py_ssize_t count) except -1:
        cdef pagert_engine engine
        with self.lock:
            if not self.handle:
                raise ValueError("the flash file is closed")
            if self.taken:
                raise ValueError("the flash file belongs to a pump")
            engine = pagert_flash_engine(self.handle)
            with nogil:
                drive(&engine, requests, count)
        return 0

    cdef int move(self, uint32_t kind, object target, uint64_t offset_bytes) except -1:
        cdef Batch batch = Batch(1)
        cdef Py_buffer *buffer = batch.hold(target, kind == PAGERT_REQUEST_READ)
        cdef pagert_request *request = batch.requests
        cdef void *staging = NULL
        cdef uint32_t alignment = max(4096, self.facts.memory_alignment)
        cdef uint64_t size_bytes = buffer.len
        if offset_bytes % self.facts.block_bytes or size_bytes % self.facts.block_bytes:
            raise ValueError(
                f"offset {offset_bytes} and size {size_bytes} must be multiples of the block "
                f"size, {self.facts.block_bytes} bytes")
        if (size_bytes > self.facts.capacity_bytes
                or offset_bytes > self.facts.capacity_bytes - size_bytes):
            raise ValueError(
                f"{size_bytes} bytes at offset {offset_bytes} do not fit the file, which has "
                f"{self.facts.capacity_bytes} bytes")
        if <uintptr_t>buffer.buf % self.facts.memory_alignment and size_bytes:
            if posix_memalign(&staging, alignment, size_bytes):
                raise MemoryError(f"no {size_bytes} bytes to align a buffer")
        try:
            if staging and kind == PAGERT_REQUEST_WRITE:
                memcpy(staging, buffer.buf, size_bytes)
            request.kind = kind
            request.target = staging if staging else buffer.buf
            request.source = request.target
            request.offset_bytes = offset_bytes
            request.size_bytes = size_bytes
            self.drive_all(request, 1)
            if request.result:
                raise OSError(-request.result,
                              f"{explain(request.result)} at byte {request.failed_offset} of the "
                              "flash file", self.folder)
            if staging and kind == PAGERT_REQUEST_READ:
                memcpy(buffer.buf, staging, size_bytes)
        finally:
            free(staging)
        return 0

    def read(self, buffer, uint64_t offset):
        """Fill a writable buffer from the file. Blocks; any alignment in memory."""
        self.move(PAGERT_REQUEST_READ, buffer, offset)

    def write(self, buffer, uint64_t offset):
        """Write a buffer to the file. Blocks; any alignment in memory."""
        self.move(PAGERT_REQUEST_WRITE, buffer, offset)

    def close(self):
        """Wait for what is in flight and give the file back. Idempotent."""
        cdef pagert_flash *handle
        if self.taken:
            raise ValueError("the flash file belongs to a pump; close that first")
        with self.lock:
            handle = self.handle
            self.handle = NULL
        if handle:
            with nogil:
                pagert_flash_close(handle)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


cdef str explain(int code):
    if code == -EBADMSG:
        return "checksum mismatch, read twice"
    if code == -ENODATA:
        return "never written"
    return reason(code)


cdef class CopyEngine:
    """Threads that fill and copy memory."""

    def __cinit__(self, int thread_count=2):
        cdef int code
        if thread_count < 1:
            raise ValueError(f"thread_count is {thread_count}; at least 1")
        self.thread_count = thread_count
        self.lock = threading.Lock()
        code = pagert_copy_open(thread_count, &self.handle)
        if code:
            self.handle = NULL
            raise OSError(-code, f"{reason(code)}: cannot start {thread_count} copy threads")

    def __dealloc__(self):
        if self.handle:
            pagert_copy_close(self.handle)

    @property
    def closed(self):
        return self.handle == NULL

    cdef int take_engine(self, pagert_engine *engine) except -1:
        if not self.handle:
            raise ValueError("the copy engine is closed")
        if self.taken:
            raise ValueError("the copy engine belongs to a pump already")
        with self.lock:
            self.taken = True
        engine[0] = pagert_copy_engine(self.handle)
        return 0

    cdef void give_engine_back(self) noexcept:
        self.taken = False

    def run(self, requests):
        """Run `("fill", target, None)` and `("copy", target, source)`, all at once. Blocks.

        Returns the result of each."""
        cdef list wanted = list(requests)
        cdef Batch batch = Batch(len(wanted))
        cdef Py_buffer *buffer
        cdef pagert_request *request
        cdef pagert_engine engine
        cdef Py_ssize_t i
        for i in range(batch.count):
            kind, target, source = wanted[i]
            request = &batch.requests[i]
            request.kind = KINDS[kind]
            buffer = batch.hold(target, True)
            request.target = buffer.buf
            request.size_bytes = buffer.len
            if kind == "copy":
                buffer = batch.hold(source, False)
                if <uint64_t>buffer.len != request.size_bytes:
                    raise ValueError(f"source has {buffer.len} bytes, target {request.size_bytes}")
                request.source = buffer.buf
        with self.lock:
            if not self.handle:
                raise ValueError("the copy engine is closed")
            if self.taken:
                raise ValueError("the copy engine belongs to a pump")
            engine = pagert_copy_engine(self.handle)
            with nogil:
                drive(&engine, batch.requests, batch.count)
        return [result for result, _ in batch.results()]

    def close(self):
        """Wait for what is in flight and end the threads. Idempotent."""
        cdef pagert_copy *handle
        if self.taken:
            raise ValueError("the copy engine belongs to a pump; close that first")
        with self.lock:
            handle = self.handle
            self.handle = NULL
        if handle:
            with nogil:
                pagert_copy_close(handle)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def crc32c(data, uint32_t seed=0):
    """Return the CRC32C of a buffer; `seed` continues an earlier result."""
    cdef Batch batch = Batch(1)
    cdef Py_buffer *buffer = batch.hold(data, False)
    cdef uint32_t checksum
    with nogil:
        checksum = pagert_crc32c(seed, buffer.buf, buffer.len)
    return checksum


def crc32c_is_hardware():
    """Whether checksums are computed by the processor's own instruction."""
    return bool(pagert_crc32c_is_hardware())
