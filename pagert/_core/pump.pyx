# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""The pump, its regions and its pins. Decides nothing: it owns handles, waits, and turns codes into errors.

The GIL is held for the core's decisions, which take microseconds, and released for every wait. Finalizers
take no lock: they leave a node for the pump to find.
"""

from libc.errno cimport EBADMSG, ETIMEDOUT, errno
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident

from pagert._core.pager cimport (
    PAGERT_DEVICE, PAGERT_E_FRAMES, PAGERT_E_FULL, PAGERT_E_PAGES, PAGERT_E_STALE, PAGERT_E_STATE,
    PAGERT_E_TRANSFER, PAGERT_FLASH, PAGERT_HOST, PAGERT_OVERWRITE, PAGERT_READ, PAGERT_UPDATE,
    pagert_policy_lru,
)

import logging
import os

from pagert.errors import (
    ConfigurationError,
    ForeignTensor,
    OutOfFrames,
    PagerClosed,
    PagertError,
    TierFull,
    TransferError,
    TransferTimeout,
)

__all__ = ["OVERWRITE", "READ", "UPDATE", "Arena", "Pin", "Pump", "Region"]

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *address, size_t length, int protection, int flags, int fd, long offset)
    int munmap(void *address, size_t length)
    int madvise(void *address, size_t length, int advice)
    const int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
    const int MADV_HUGEPAGE, MADV_DONTFORK
    void *MAP_FAILED

READ = <object>PAGERT_READ
UPDATE = <object>PAGERT_UPDATE
OVERWRITE = <object>PAGERT_OVERWRITE

cdef size_t HUGE_PAGE_BYTES = 2 << 20
cdef uint64_t SLICE_NS = 50_000_000       # a wait looks for Ctrl-C this often
cdef uint64_t CLOSE_SLICE_NS = 1_000_000_000
cdef uint32_t MEMORY_DEPTH = 16           # copies in flight; each is cut among the copy threads anyway
LINKS = ("fill of a zero page", "move within the device tier", "copy from host to device",
         "read from flash to device", "read from flash to host", "copy from device to host",
         "write from device to flash", "write from host to flash")
_log = logging.getLogger("pagert")

cdef unsigned long fork_count = 0


def _count_fork():
    global fork_count
    fork_count += 1


os.register_at_fork(after_in_child=_count_fork)


cdef double now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <double>t.tv_sec + 1e-9 * <double>t.tv_nsec


def _size(uint64_t size_bytes):
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} bytes"


cdef class Arena:
    """Anonymous memory for frames: aligned to 2 MiB and backed by huge pages where the kernel has them.

    Where the bytes lie decides the speed of direct I/O: scattered OS pages split every request. Memory is
    taken when it is first touched. Exposes a writable buffer of bytes.
    """

    def __cinit__(self, size_t size_bytes):
        self.mapping_bytes = size_bytes + HUGE_PAGE_BYTES
        self.mapping = mmap(NULL, self.mapping_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if self.mapping == MAP_FAILED:
            self.mapping = NULL
            raise MemoryError(f"cannot map {_size(size_bytes)} for a tier: {os.strerror(errno)}; "
                              "lower device_bytes or host_bytes")
        self.address = (<uintptr_t>self.mapping + HUGE_PAGE_BYTES - 1) & ~(HUGE_PAGE_BYTES - 1)
        self.size_bytes = size_bytes
        madvise(<void *><uintptr_t>self.address, size_bytes, MADV_HUGEPAGE)  # refused: ordinary OS pages

    def __dealloc__(self):
        if self.mapping:
            munmap(self.mapping, self.mapping_bytes)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void *><uintptr_t>self.address, self.size_bytes, 0, flags)


cdef class Region:
    """A range of virtual pages that backs one storage. Released when collected, without a lock."""

    def __dealloc__(self):
        if not self.node:
            return
        if self.pump is not None and self.pump.handle:
            if self.pump.recorder is not None:
                try:
                    self.pump.recorder.append(self.serial)
                except MemoryError:
                    pass  # a trace in which this region never goes
            self.node.region = self.handle
            pagert_pump_release_later(self.pump.handle, self.node)
        else:
            free(self.node)


cdef class Pin:
    """Ranges that are held resident until `release()`; idempotent. Also a context manager."""

    cpdef release(self):
        """Let the ranges go. Does not block."""
        cdef held_pin *held = self.held
        if not held:
            return
        self.held = NULL
        unlink(self.pump, held)
        if self.pump.handle:
            pagert_pump_unpin(self.pump.handle, &held.pin)
        free(held)
        self.regions = None

    def __dealloc__(self):
        if self.held and self.pump.handle:
            unlink(self.pump, self.held)
            self.node.pin = &self.held.pin
            pagert_pump_release_later(self.pump.handle, self.node)
        else:
            free(self.held)
            free(self.node)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.release()


cdef void unlink(Pump pump, held_pin *held) noexcept:
    if held.older:
        held.older.younger = held.younger
    if held.younger:
        held.younger.older = held.older
    elif pump.pins == held:
        pump.pins = held.older


cdef class Pump:
    """The core, its lock, its thread and its arenas. See include/pagert/pump.h."""

    def __cinit__(self, *, uint64_t page_bytes, uint32_t page_count, uint32_t device_frames,
                  uint32_t host_frames=0, FlashFile flash=None, str policy="lru",
                  uint32_t transfer_pages_max=16, int copy_threads=2, double warn_seconds=30.0,
                  double deadline_seconds=600.0):
        cdef pagert_pump_options options
        cdef int code
        memset(&options, 0, sizeof(options))
        if policy != "lru":
            raise ConfigurationError(f"policy is {policy!r}; allowed: 'lru'")
        self.page_bytes = page_bytes
        self.device_frames = device_frames
        self.warn_seconds = warn_seconds
        self.deadline_seconds = deadline_seconds
        self.process = fork_count
        self.arena = Arena(page_bytes * device_frames)
        options.config.page_bytes = page_bytes
        options.config.page_count = page_count
        options.config.frame_count[<int>PAGERT_DEVICE] = device_frames
        options.config.frame_count[<int>PAGERT_HOST] = host_frames
        options.config.transfer_pages_max = transfer_pages_max
        options.config.policy = pagert_policy_lru()
        options.device_arena = <void *><uintptr_t>self.arena.address
        if host_frames:
            self.host_arena = Arena(page_bytes * host_frames)
            options.host_arena = <void *><uintptr_t>self.host_arena.address
        self.copy_engine = CopyEngine(copy_threads)
        self.copy_engine.take_engine(&options.memory)
        options.memory_depth = MEMORY_DEPTH
        try:
            if flash is not None:
                options.config.frame_count[<int>PAGERT_FLASH] = <uint32_t>(
                    flash.facts.capacity_bytes // page_bytes)
                flash.take_engine(&options.flash)
                self.flash = flash
                options.flash_depth = flash.facts.depth
            code = pagert_pump_open(&options, &self.handle)
            if code < 0:
                raise PagertError(f"the pump cannot start: code {code}")
        except BaseException:
            self.handle = NULL
            self.close_engines()
            raise

    def __dealloc__(self):
        # Nobody can reach it any more, and its regions are gone. What is in flight comes back first; in a
        # forked child neither the thread nor the requests exist.
        if self.handle and self.process == fork_count:
            with nogil:
                while pagert_pump_close(self.handle, CLOSE_SLICE_NS) == -ETIMEDOUT:
                    pass
            self.handle = NULL
        if self.process == fork_count:
            self.close_engines()

    def close_engines(self):
        if self.copy_engine is not None:
            self.copy_engine.give_engine_back()
            self.copy_engine.close()
        if self.flash is not None:
            self.flash.give_engine_back()
            self.flash.close()

    @property
    def closed(self):
        return self.handle == NULL or self.closing

    @property
    def flash_info(self):
        """What was found out about the flash file; None without a flash tier."""
        return None if self.flash is None else {**self.flash.info, "folder": self.flash.folder}

    # Calls

    cdef int enter(self) except -1:
        """Refuse a closed pump, and one that belongs to the process before a fork."""
        if self.process != fork_count:
            raise PagerClosed("this pager belongs to the parent process; its memory and files are not "
                              "shared: make a pager of its own in the child")
        if not self.handle or self.closing:
            raise PagerClosed("the pager is closed and its tensors have no bytes any more; use them inside "
                              "its `with` block, or unpage_() what must outlive it")
        return 0

    cdef bint others_hold(self) noexcept:
        """Whether a thread other than this one holds a pin: then waiting can help."""
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef held_pin *held = self.pins
        while held:
            if held.thread != me:
                return True
            held = held.older
        return False

    cdef int wait(self, str what, double *started, bint *warned) except -1:
        """Between two slices of a wait: Ctrl-C, the warning and the deadline."""
        cdef pagert_pump_state state
        cdef double waited = now() - started[0]
        PyErr_CheckSignals()
        if waited < self.warn_seconds and waited < self.deadline_seconds:
            return 0
        if waited >= self.deadline_seconds or not warned[0]:
            pagert_pump_get_state(self.handle, &state)
            oldest = ("nothing is in flight" if state.oldest_link == PAGERT_LINK_COUNT else
                      f"the oldest of {state.in_flight} transfers in flight is a "
                      f"{LINKS[state.oldest_link]}, {state.oldest_request_ns * 1e-9:.1f} s old")
            where = "" if self.flash is None else f"; flash lies in {self.flash.folder}"
            text = f"{what} has waited {waited:.0f} s: {oldest}{where}"
            if waited >= self.deadline_seconds:
                raise TransferTimeout(f"{text}; the limit is deadline_seconds={self.deadline_seconds:g}")
            warned[0] = True
            _log.warning("%s; it fails after deadline_seconds=%g", text, self.deadline_seconds)
        return 0

    cdef int refuse(self, int code, const pagert_pin *pin, const pagert_failure *failure) except -1:
        """Raise what a code means."""
        cdef pagert_pump_state state
        cdef uint64_t capacity = self.device_frames
        if code == PAGERT_E_FRAMES:
            error = OutOfFrames(
                f"a pin needs {pin.frames_needed} frames ({_size(pin.frames_needed * self.page_bytes)}); "
                f"{pin.frames_unheld} of {capacity} are unpinned; raise device_bytes or use smaller tensors")
            error.needed_bytes = pin.frames_needed * self.page_bytes
            error.unpinned_bytes = pin.frames_unheld * self.page_bytes
            error.capacity_bytes = capacity * self.page_bytes
            raise error
        pagert_pump_get_state(self.handle, &state)
        tiers = ", ".join(
            f"{name} {_size(state.usage[i].used_frames * self.page_bytes)} of "
            f"{_size(state.usage[i].capacity_frames * self.page_bytes)}"
            for i, name in enumerate(("device", "host", "flash")) if state.usage[i].capacity_frames)
        if code == PAGERT_E_FULL:
            raise TierFull(f"changed pages must leave the device, and no tier below has room for them "
                           f"(used: {tiers}); nothing is lost; raise flash_bytes or host_bytes, or delete "
                           "tensors")
        if code == PAGERT_E_TRANSFER:
            folder = None if self.flash is None else self.flash.folder
            number = -failure.result
            reason = ("checksum mismatch, read twice" if number == EBADMSG else os.strerror(number))
            where = (f" at byte {state.last_failed_offset} of the flash file"
                     if folder is not None and state.last_failure.page == failure.page else "")
            raise TransferError(number, f"{LINKS[failure.link]} failed{where}: {reason} (used: {tiers}); "
                                        "changed pages stay where they are", folder)
        if code == PAGERT_E_PAGES:
            raise PagertError(f"the virtual address space is full: {state.reserved_pages} pages are "
                              "reserved; delete tensors")
        if code == PAGERT_E_STALE:
            raise PagertError("the region was released")
        if code == PAGERT_E_STATE:
            raise PagertError("an operator holds these pages; leave resident() first")
        raise ValueError(f"the core refused the call: code {code}")

    def reserve(self, uint64_t size_bytes):
        """Reserve a region of zero pages, which take no frame until they are written. Does not block."""
        cdef Region region = Region.__new__(Region)
        self.enter()
        cdef pagert_release_node *node = <pagert_release_node *>calloc(1, sizeof(pagert_release_node))
        if not node:
            raise MemoryError
        cdef int code = pagert_pump_reserve(self.handle, size_bytes, &region.handle)
        if code < 0:
            free(node)
            self.refuse(code, NULL, NULL)
        region.node = node
        region.pump = self
        region.size_bytes = size_bytes
        region.serial = self.region_count
        self.region_count += 1
        if self.recorder is not None:
            self.recorder.append((region.serial, size_bytes))
        return region

    cdef int hold(self, held_pin *held) except -1:
        """Pin, waiting as long as it takes. On an error nothing is held."""
        cdef int outcome
        cdef double started = 0
        cdef bint warned = False
        cdef pagert_failure failure
        outcome = pagert_pump_pin(self.handle, &held.pin, 0)
        if outcome == 1:
            return 0
        started = now()
        self.calls += 1
        try:
            while outcome != 1:
                if outcome == PAGERT_E_FRAMES and self.others_hold():
                    with nogil:
                        pagert_pump_wait_change(self.handle, SLICE_NS)
                    self.wait("an operator that needs frames held by other threads", &started, &warned)
                    held.pin.state = 0
                    outcome = pagert_pump_pin(self.handle, &held.pin, 0)
                elif outcome < 0:
                    failure = held.pin.failure
                    self.refuse(outcome, &held.pin, &failure)
                else:
                    with nogil:
                        outcome = pagert_pump_pin_wait(self.handle, &held.pin, SLICE_NS)
                    if outcome == 0:
                        try:
                            self.wait("an operator's operands", &started, &warned)
                            if self.closing:
                                self.enter()
                        except BaseException:
                            pagert_pump_unpin(self.handle, &held.pin)
                            raise
        finally:
            self.calls -= 1
        return 0

    def pin(self, accesses):
        """Hold (region, offset_bytes, size_bytes, mode) ranges, all at once. Blocks until resident."""
        cdef Py_ssize_t count = len(accesses), i
        cdef Region region
        cdef held_pin *held
        cdef Pin pin
        self.enter()
        if count == 0:
            raise ValueError("a pin needs at least one access")
        pin = Pin.__new__(Pin)
        pin.pump = self
        pin.node = <pagert_release_node *>calloc(1, sizeof(pagert_release_node))
        held = <held_pin *>calloc(1, sizeof(held_pin) + <size_t>(count - 1) * sizeof(pagert_access))
        if not held or not pin.node:
            free(held)
            raise MemoryError
        regions = []
        try:
            held.pin.accesses = held.accesses
            held.pin.access_count = <uint32_t>count
            for i in range(count):
                owner, offset_bytes, size_bytes, mode = accesses[i]
                region = owner
                if region.pump is not self:
                    raise ForeignTensor("tensors of two pagers meet in one operator; copy one of them to "
                                        "the other's pager first")
                regions.append(region)
                held.accesses[i].region = region.handle
                held.accesses[i].offset_bytes = offset_bytes
                held.accesses[i].size_bytes = size_bytes
                held.accesses[i].mode = mode
            held.thread = PyThread_get_thread_ident()
            self.hold(held)
            if not self.handle:
                self.enter()
        except BaseException:
            free(held)
            raise
        pin.regions = regions
        pin.device_bytes = tuple([held.accesses[i].device_bytes for i in range(count)])
        pin.held = held
        if self.recorder is not None:
            self.note(regions, held)
        held.older = self.pins
        if self.pins:
            self.pins.younger = held
        self.pins = held
        return pin

    cdef int note(self, list regions, held_pin *held) except -1:
        """Append what a pin holds to the recorder's list."""
        cdef Py_ssize_t i
        cdef Region region
        cdef list ranges = []
        for i in range(len(regions)):
            region = regions[i]
            ranges.append((region.serial, region.size_bytes, held.accesses[i].offset_bytes,
                           held.accesses[i].size_bytes, held.accesses[i].mode))
        self.recorder.append(ranges)
        return 0

    def prefetch(self, Region region, uint64_t offset_bytes, uint64_t size_bytes):
        """Start the fetch of a range. A hint: does nothing where there is no room. Does not block."""
        cdef int code
        self.enter()
        code = pagert_pump_prefetch(self.handle, region.handle, offset_bytes, size_bytes)
        if code < 0 and code not in (PAGERT_E_FRAMES, PAGERT_E_FULL, PAGERT_E_TRANSFER):
            self.refuse(code, NULL, NULL)

    def evict(self, Region region, uint64_t offset_bytes, uint64_t size_bytes):
        """Bring a range to the tiers below. Blocks until it has left the device."""
        cdef int outcome
        cdef double started = now()
        cdef bint warned = False
        cdef pagert_failure failure
        self.enter()
        self.calls += 1
        try:
            while True:
                with nogil:
                    outcome = pagert_pump_evict(self.handle, region.handle, offset_bytes, size_bytes,
                                                SLICE_NS, &failure)
                if outcome == 1:
                    return
                if outcome < 0:
                    self.refuse(outcome, NULL, &failure)
                self.wait("evict()", &started, &warned)
        finally:
            self.calls -= 1

    def flush(self):
        """Write back every dirty page that no operator holds. Blocks until all are written."""
        cdef int outcome
        cdef double started = now()
        cdef bint warned = False
        cdef pagert_failure failure
        self.enter()
        self.calls += 1
        try:
            while True:
                with nogil:
                    outcome = pagert_pump_flush(self.handle, SLICE_NS, &failure)
                if outcome == 1:
                    return
                if outcome < 0:
                    self.refuse(outcome, NULL, &failure)
                self.wait("flush()", &started, &warned)
        finally:
            self.calls -= 1

    def locate(self, Region region, uint64_t offset_bytes, uint64_t size_bytes):
        """Pages of the range that are zero, on device, on host, on flash (fastest copy)."""
        cdef pagert_residency found
        cdef int code
        self.enter()
        code = pagert_pump_locate(self.handle, region.handle, offset_bytes, size_bytes, &found)
        if code < 0:
            self.refuse(code, NULL, NULL)
        return found.zero, found.pages[<int>PAGERT_DEVICE], found.pages[<int>PAGERT_HOST], \
            found.pages[<int>PAGERT_FLASH]

    def state(self):
        """Counters and usage, in pages and nanoseconds; `pagert.stats` gives them names and units."""
        cdef pagert_pump_state state
        self.enter()
        pagert_pump_get_state(self.handle, &state)
        return {
            "counters": {
                "hits": state.counters.hits,
                "faults": state.counters.faults,
                "evictions": state.counters.evictions,
                "prefetches": state.counters.prefetches,
                "transferred": [state.counters.transferred[i] for i in range(PAGERT_LINK_COUNT)],
                "transfers": [state.counters.transfers[i] for i in range(PAGERT_LINK_COUNT)],
                "failed_transfers": state.counters.failed_transfers,
            },
            "usage": [(state.usage[i].capacity_frames, state.usage[i].used_frames,
                       state.usage[i].peak_frames) for i in range(PAGERT_TIER_COUNT)],
            "held_frames": state.held_frames,
            "in_flight": state.in_flight,
            "reserved_pages": state.reserved_pages,
            "stall_ns": state.stall_ns,
        }

    def reset_counters(self):
        self.enter()
        pagert_pump_reset_counters(self.handle)

    def check(self):
        """Verify the core's whole state: 0, or the line of the check that failed."""
        self.enter()
        return pagert_pump_check(self.handle)

    def close(self):
        """Stop the thread, give back the files and the tiers' memory. Blocks until nothing is in flight.

        Idempotent. Raises `PagertError` while a `resident()` block is open.
        """
        cdef int code
        cdef double started = now()
        cdef bint warned = False
        cdef pagert_pump *handle
        if not self.handle or self.closing or self.process != fork_count:
            return
        if self.pins:
            raise PagertError("an operator or a resident() block still holds tensors of this pager; "
                              "leave it before close()")
        self.closing = True
        try:
            while True:
                if self.calls == 0:
                    handle = self.handle
                    self.handle = NULL  # from here on regions are not handed back one by one
                    with nogil:
                        code = pagert_pump_close(handle, SLICE_NS)
                    if code == 0:
                        break
                    self.handle = handle
                else:
                    with nogil:
                        pagert_pump_wait_change(self.handle, SLICE_NS)
                self.wait("close()", &started, &warned)
        except BaseException:
            self.closing = False
            raise
        self.close_engines()
