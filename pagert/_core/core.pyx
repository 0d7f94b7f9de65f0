# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""libcore as it is: one class that owns a core, with no engine, no pump and no bytes behind it.

The tests and the simulator drive it. Whoever holds a `Core` carries out the transfers, or pretends to.
"""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

import os
from typing import NamedTuple

__all__ = [
    "ABSENT", "ALL_LINKS", "DEVICE", "DEVICE_TO_FLASH", "DEVICE_TO_HOST", "E_ARGUMENT", "E_FRAMES",
    "E_FULL", "E_PAGES", "E_STALE", "E_STATE", "E_TRANSFER", "FETCHING", "FILL", "FLASH",
    "FLASH_TO_DEVICE", "FLASH_TO_HOST", "FREE", "HOST", "HOST_TO_DEVICE", "HOST_TO_FLASH",
    "LINK_COUNT", "MOVE", "NONE", "OVERWRITE", "READ", "RESIDENT", "TIER_COUNT", "UPDATE",
    "WRITING_BACK", "ZERO", "Core", "CoreError", "CorePin", "Counters", "Failure", "PageInfo",
    "PinnedAccess", "RegionHandle", "Residency", "Transfer", "Usage", "memory_bytes",
    "policy_names",
]

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *address, size_t length, int protection, int flags, int fd, long offset)
    int munmap(void *address, size_t length)
    const int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
    void *MAP_FAILED

NONE = <object>PAGERT_NONE

E_ARGUMENT = PAGERT_E_ARGUMENT
E_STALE = PAGERT_E_STALE
E_PAGES = PAGERT_E_PAGES
E_FRAMES = PAGERT_E_FRAMES
E_FULL = PAGERT_E_FULL
E_STATE = PAGERT_E_STATE
E_TRANSFER = PAGERT_E_TRANSFER

DEVICE = PAGERT_DEVICE
HOST = PAGERT_HOST
FLASH = PAGERT_FLASH
TIER_COUNT = PAGERT_TIER_COUNT

READ = PAGERT_READ
UPDATE = PAGERT_UPDATE
OVERWRITE = PAGERT_OVERWRITE

FILL = PAGERT_FILL
MOVE = PAGERT_MOVE
HOST_TO_DEVICE = PAGERT_HOST_TO_DEVICE
FLASH_TO_DEVICE = PAGERT_FLASH_TO_DEVICE
FLASH_TO_HOST = PAGERT_FLASH_TO_HOST
DEVICE_TO_HOST = PAGERT_DEVICE_TO_HOST
DEVICE_TO_FLASH = PAGERT_DEVICE_TO_FLASH
HOST_TO_FLASH = PAGERT_HOST_TO_FLASH
LINK_COUNT = PAGERT_LINK_COUNT
ALL_LINKS = (1 << PAGERT_LINK_COUNT) - 1

ZERO = PAGERT_PAGE_ZERO
ABSENT = PAGERT_PAGE_ABSENT
FETCHING = PAGERT_PAGE_FETCHING
RESIDENT = PAGERT_PAGE_RESIDENT
WRITING_BACK = PAGERT_PAGE_WRITING_BACK
FREE = PAGERT_PAGE_FREE

cdef dict _code_names = {
    PAGERT_E_ARGUMENT: "PAGERT_E_ARGUMENT", PAGERT_E_STALE: "PAGERT_E_STALE",
    PAGERT_E_PAGES: "PAGERT_E_PAGES", PAGERT_E_FRAMES: "PAGERT_E_FRAMES",
    PAGERT_E_FULL: "PAGERT_E_FULL", PAGERT_E_STATE: "PAGERT_E_STATE",
    PAGERT_E_TRANSFER: "PAGERT_E_TRANSFER",
}


class RegionHandle(NamedTuple):
    """Handle of a region."""

    first_page: int
    generation: int


class Transfer(NamedTuple):
    """One transfer to carry out. Hand the same value to `Core.complete`."""

    link: int
    first_page: int
    page_count: int
    source_frame: int
    target_frame: int


class Failure(NamedTuple):
    """Which transfer failed, and why."""

    page: int
    link: int
    result: int


class PinnedAccess(NamedTuple):
    """What a pin knows about one of its accesses; `device_bytes` counts once the pin is ready."""

    first_page: int
    page_count: int
    device_bytes: int


class Residency(NamedTuple):
    """Pages of a range, counted by fastest valid copy."""

    zero: int
    device: int
    host: int
    flash: int


class Counters(NamedTuple):
    """Counters of the core, in pages unless said otherwise in core.h."""

    hits: int
    faults: int
    evictions: int
    prefetches: int
    transferred: tuple
    transfers: tuple
    failed_transfers: int
    lru_moved: int


class Usage(NamedTuple):
    """Frames of one tier."""

    capacity_frames: int
    used_frames: int
    peak_frames: int


class PageInfo(NamedTuple):
    """One page as the page table has it."""

    state: int
    frame: tuple
    holds: int
    dirty: int


class CoreError(Exception):
    """A call into the core was refused, or a pin failed.

    Attributes
    ----------
    code : int
        One of `E_*`.
    failure : Failure or None
        The transfer that failed, where one did.
    frames_needed, frames_unheld : int
        Set for `E_FRAMES`.
    """

    def __init__(self, code, failure=None, frames_needed=0, frames_unheld=0):
        super().__init__(code, failure, frames_needed, frames_unheld)
        self.code = code
        self.failure = failure
        self.frames_needed = frames_needed
        self.frames_unheld = frames_unheld

    def __str__(self):
        text = _code_names.get(self.code, f"code {self.code}")
        if self.code == PAGERT_E_FRAMES:
            text += f": {self.frames_needed} frames needed, {self.frames_unheld} unheld"
        if self.failure is not None:
            text += f": page {self.failure.page}, link {self.failure.link}, {self.failure.result}"
        return text


cdef int64_t check(int64_t code) except? -1:
    if code < 0:
        raise CoreError(code)
    return code


cdef int64_t check_failure(int64_t code, const pagert_failure *failure) except? -1:
    if code == PAGERT_E_TRANSFER or code == PAGERT_E_FULL:
        raise CoreError(code, Failure(failure.page, failure.link, failure.result))
    return check(code)


def policy_names():
    """Return the name of each eviction policy."""
    cdef list names = []
    cdef const char *name
    while (name := pagert_policy_name(<uint32_t>len(names))) != NULL:
        names.append(name.decode())
    return tuple(names)


cdef const pagert_policy *policy_named(str name) except NULL:
    cdef const pagert_policy *policy = NULL
    if name is not None and '\0' not in name:
        policy = pagert_policy_named(name.encode())
    if policy == NULL:
        raise ValueError(f"policy is {name!r}; allowed: " + ", ".join(map(repr, policy_names())))
    return policy


cdef int _fill_config(pagert_config *config, page_bytes, page_count, device_frames, host_frames,
                      flash_frames, transfer_pages_max, str policy) except -1:
    memset(config, 0, sizeof(pagert_config))
    config.page_bytes = page_bytes
    config.page_count = page_count
    config.frame_count[<int>PAGERT_DEVICE] = device_frames
    config.frame_count[<int>PAGERT_HOST] = host_frames
    config.frame_count[<int>PAGERT_FLASH] = flash_frames
    config.transfer_pages_max = transfer_pages_max
    config.policy = policy_named(policy)
    return 0


cdef pagert_region _region(region):
    cdef pagert_region raw
    raw.first_page = region[0]
    raw.generation = region[1]
    return raw


def memory_bytes(*, page_bytes, page_count, device_frames, host_frames=0, flash_frames=0,
                 transfer_pages_max=1, str policy="lru"):
    """Bytes of memory that a core of this configuration needs; 0 if it is invalid."""
    cdef pagert_config config
    _fill_config(&config, page_bytes, page_count, device_frames, host_frames, flash_frames,
                 transfer_pages_max, policy)
    return pagert_memory_bytes(&config)


cdef class Core:
    """One core and the memory it lives in, mapped lazily. Single-threaded, like the core itself."""

    def __cinit__(self, *, page_bytes, page_count, device_frames, host_frames=0, flash_frames=0,
                  transfer_pages_max=1, str policy="lru", memory_bytes=None):
        cdef pagert_config config
        _fill_config(&config, page_bytes, page_count, device_frames, host_frames, flash_frames,
                     transfer_pages_max, policy)
        cdef uint64_t needed = pagert_memory_bytes(&config)
        if memory_bytes is not None:
            needed = memory_bytes
        # An invalid configuration needs 0 bytes, which mmap refuses; let the core do the refusing.
        self._mapped_bytes = needed if needed else 4096
        self._memory = mmap(NULL, self._mapped_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if self._memory == MAP_FAILED:
            self._memory = NULL
            raise OSError(errno, os.strerror(errno))
        self.memory_bytes = needed
        check(pagert_init(&config, self._memory, needed, &self._handle))

    def __dealloc__(self):
        if self._memory != NULL:
            munmap(self._memory, self._mapped_bytes)

    def reserve(self, size_bytes):
        """Reserve a region of at least `size_bytes`."""
        cdef pagert_region region
        check(pagert_reserve(self._handle, size_bytes, &region))
        return RegionHandle(region.first_page, region.generation)

    def release(self, region):
        """Release a region."""
        check(pagert_release(self._handle, _region(region)))

    def pin(self, accesses):
        """Start a pin of (region, offset_bytes, size_bytes, mode) ranges; see `CorePin.ready`."""
        return CorePin(self, accesses)

    def prefetch(self, region, offset_bytes, size_bytes):
        """Start the fetch of a range; whether all of it is resident or on its way."""
        return bool(check(pagert_prefetch(self._handle, _region(region), offset_bytes, size_bytes)))

    def look_ahead(self, backlog_max):
        """Evict, fetch and write ahead of time as the policy expects; how many pages were started."""
        return pagert_look_ahead(self._handle, backlog_max)

    def evict(self, region, offset_bytes, size_bytes):
        """Start eviction of a range; how many of its pages are still on the device."""
        cdef pagert_failure failure
        memset(&failure, 0, sizeof(failure))
        return check_failure(pagert_evict(self._handle, _region(region), offset_bytes, size_bytes,
                                          &failure), &failure)

    def flush(self):
        """Start writeback of dirty unheld pages; how many there still are."""
        cdef pagert_failure failure
        memset(&failure, 0, sizeof(failure))
        return check_failure(pagert_flush(self._handle, &failure), &failure)

    def next_transfer(self, uint32_t link_mask=(1 << PAGERT_LINK_COUNT) - 1):
        """Take the next transfer on one of the links of `link_mask`, or None."""
        cdef pagert_transfer raw
        if check(pagert_next_transfer(self._handle, link_mask, &raw)) == 0:
            return None
        return Transfer(raw.link, raw.first_page, raw.page_count, raw.source_frame,
                        raw.target_frame)

    def complete(self, transfer, int32_t result=0):
        """Report the end of a transfer."""
        cdef pagert_transfer raw
        raw.link, raw.first_page, raw.page_count, raw.source_frame, raw.target_frame = transfer
        check(pagert_complete(self._handle, &raw, result))

    def locate(self, region, offset_bytes, size_bytes):
        """Count the pages of a range by where they lie."""
        cdef pagert_residency raw
        check(pagert_locate(self._handle, _region(region), offset_bytes, size_bytes, &raw))
        return Residency(raw.zero, raw.pages[<int>PAGERT_DEVICE], raw.pages[<int>PAGERT_HOST],
                         raw.pages[<int>PAGERT_FLASH])

    def counters(self):
        """Counters since the start or the last `reset_counters`."""
        cdef pagert_counters raw
        pagert_get_counters(self._handle, &raw)
        cdef int link
        return Counters(
            raw.hits, raw.faults, raw.evictions, raw.prefetches,
            tuple([raw.transferred[link] for link in range(PAGERT_LINK_COUNT)]),
            tuple([raw.transfers[link] for link in range(PAGERT_LINK_COUNT)]),
            raw.failed_transfers,
            raw.lru_moved,
        )

    def usage(self, uint32_t tier):
        """Frames of a tier."""
        cdef pagert_usage raw
        pagert_get_usage(self._handle, tier, &raw)
        return Usage(raw.capacity_frames, raw.used_frames, raw.peak_frames)

    def reset_counters(self):
        """Set counters to 0 and peaks to what is used now."""
        pagert_reset_counters(self._handle)

    @property
    def held_frames(self):
        """Device frames that pins hold."""
        return pagert_held_frames(self._handle)

    @property
    def reserved_pages(self):
        """Virtual pages of live regions."""
        return pagert_reserved_pages(self._handle)

    @property
    def in_flight(self):
        """Transfers handed out and not completed."""
        return pagert_in_flight(self._handle)

    @property
    def is_idle(self):
        """Whether nothing is in flight, and nothing wants to be."""
        return pagert_is_idle(self._handle) != 0

    def page(self, uint32_t page):
        """One page as the page table has it."""
        cdef pagert_page_info raw
        check(pagert_page(self._handle, page, &raw))
        return PageInfo(raw.state, (raw.frame[0], raw.frame[1], raw.frame[2]), raw.holds, raw.dirty)

    def check(self):
        """0, or the line of the first check that failed."""
        return pagert_check(self._handle)


@cython.no_gc  # it must still know its core when it is collected; no cycle runs through a core
cdef class CorePin:
    """The C pin and its accesses. Made by `Core.pin`; let go of by `release`, or when collected."""

    cdef Core _core
    cdef pagert_pin _pin
    cdef bint _held
    cdef readonly bint ready

    def __cinit__(self, Core core not None, accesses):
        accesses = list(accesses)
        self._core = core
        self._pin.accesses = <pagert_access *>calloc(max(len(accesses), 1), sizeof(pagert_access))
        if self._pin.accesses == NULL:
            raise MemoryError()
        self._pin.access_count = len(accesses)
        cdef pagert_access *raw
        cdef Py_ssize_t index
        for index, (region, offset_bytes, size_bytes, mode) in enumerate(accesses):
            raw = &self._pin.accesses[index]
            raw.region = _region(region)
            raw.offset_bytes = offset_bytes
            raw.size_bytes = size_bytes
            raw.mode = mode
        cdef int code = pagert_pin_start(core._handle, &self._pin)
        if code < 0:
            self._raise(code)
        self._held = True
        self.ready = code == 1

    def __dealloc__(self):
        if self._held:
            pagert_unpin(self._core._handle, &self._pin)
        free(self._pin.accesses)

    cdef int _raise(self, int code) except? -1:
        if code == PAGERT_E_FRAMES:
            raise CoreError(code, None, self._pin.frames_needed, self._pin.frames_unheld)
        check_failure(code, &self._pin.failure)
        return 0

    def poll(self):
        """Whether every access is resident. Raises `CoreError` if the pin failed."""
        cdef int code = pagert_pin_poll(self._core._handle, &self._pin)
        if code < 0:
            self._raise(code)
        self.ready = code == 1
        return self.ready

    def restart(self):
        """Start the same C pin once more, which the core refuses while it is held."""
        cdef int code = pagert_pin_start(self._core._handle, &self._pin)
        if code < 0:
            self._raise(code)
        self._held = True
        self.ready = code == 1

    def release(self):
        """Let go. Raises `CoreError` if it is not held any more."""
        check(pagert_unpin(self._core._handle, &self._pin))
        self._held = False
        self.ready = False

    @property
    def accesses(self):
        """What the core filled in, in the order asked for."""
        return tuple([
            PinnedAccess(self._pin.accesses[index].first_page, self._pin.accesses[index].page_count,
                         self._pin.accesses[index].device_bytes)
            for index in range(self._pin.access_count)
        ])
