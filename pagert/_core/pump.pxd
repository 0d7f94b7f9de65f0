# SPDX-License-Identifier: Apache-2.0
# Mirrors include/pagert/pump.h: same names, same order. Then the classes that own its handles.

from libc.stdint cimport int32_t, uint32_t, uint64_t

from pagert._core.arena cimport Arena
from pagert._core.device cimport Device
from pagert._core.flash cimport FlashFile, pagert_engine
from pagert._core.core cimport (
    PAGERT_LINK_COUNT, PAGERT_TIER_COUNT, pagert_access, pagert_config, pagert_counters, pagert_failure,
    pagert_pin, pagert_region, pagert_residency, pagert_transfer, pagert_usage,
)
from pagert._core.users cimport user

cdef extern from "pagert/pump.h" nogil:
    ctypedef struct pagert_pump:
        pass

    ctypedef struct pagert_pump_options:
        pagert_config config
        void *device_arena
        void *host_arena
        pagert_engine memory
        pagert_engine flash
        uint32_t memory_depth
        uint32_t flash_depth
        uint64_t flash_read_bytes, flash_write_bytes

    int pagert_pump_open(const pagert_pump_options *options, pagert_pump **pump)
    int pagert_pump_stop(pagert_pump *pump, uint64_t timeout_ns)
    void pagert_pump_resume(pagert_pump *pump)
    void pagert_pump_close(pagert_pump *pump)

    int pagert_pump_reserve(pagert_pump *pump, uint64_t size_bytes, pagert_region *region)
    int pagert_pump_release(pagert_pump *pump, pagert_region region)

    ctypedef struct pagert_release_node:
        pagert_region region
        pagert_pin *pin
        pagert_release_node *next
    void pagert_pump_release_later(pagert_pump *pump, pagert_release_node *node)

    int pagert_pump_pin(pagert_pump *pump, pagert_pin *pin, uint64_t timeout_ns)
    int pagert_pump_pin_wait(pagert_pump *pump, pagert_pin *pin, uint64_t timeout_ns)
    int pagert_pump_unpin(pagert_pump *pump, pagert_pin *pin)
    uint64_t pagert_pump_changes(const pagert_pump *pump)
    void pagert_pump_wait_change(pagert_pump *pump, uint64_t seen, uint64_t timeout_ns)

    int pagert_pump_prefetch(pagert_pump *pump, pagert_region region, uint64_t offset_bytes,
                             uint64_t size_bytes)
    int pagert_pump_evict(pagert_pump *pump, pagert_region region, uint64_t offset_bytes,
                          uint64_t size_bytes, int again, uint64_t timeout_ns, pagert_failure *failure)
    int pagert_pump_flush(pagert_pump *pump, int again, uint64_t timeout_ns, pagert_failure *failure)
    int pagert_pump_locate(pagert_pump *pump, pagert_region region, uint64_t offset_bytes,
                           uint64_t size_bytes, pagert_residency *residency)

    ctypedef struct pagert_pump_state:
        pagert_counters counters
        pagert_usage usage[PAGERT_TIER_COUNT]
        uint32_t held_frames
        uint32_t in_flight
        uint64_t reserved_pages
        uint64_t stall_ns
        uint64_t oldest_request_ns
        uint32_t oldest_link
        uint64_t oldest_bytes
        pagert_transfer last_failed
        int32_t last_failed_result
        uint64_t last_failed_offset
    void pagert_pump_get_state(pagert_pump *pump, pagert_pump_state *state)
    void pagert_pump_reset_counters(pagert_pump *pump)
    int pagert_pump_check(pagert_pump *pump)


# A pin with what the pump's owner needs beside it; `pin` comes first, so that both share an address.
cdef struct held_pin:
    pagert_pin pin
    user user
    pagert_access accesses[1]   # as many as the pin has


# What a region's last owner leaves for the pump, which frees it; `later` comes first, so that both share an address.
cdef struct region_node:
    pagert_release_node later
    uint32_t owner_count


cdef class Region

cdef class Pump:
    cdef pagert_pump *handle    # owned; NULL once closed
    cdef readonly Device device # owned
    cdef readonly Arena arena   # the device's
    cdef FlashFile flash        # owned, may be None
    cdef readonly uint64_t page_bytes
    cdef uint32_t device_frames
    cdef double warn_seconds, deadline_seconds
    cdef bint closing           # refuse new calls, end those that wait
    cdef bint hangs             # an engine did not give its requests back before the deadline
    cdef unsigned long process  # count of forks when it was opened
    cdef user *calls            # under way in some thread: close() waits for them
    cdef user *pins             # held, or on their way to be; the youngest first
    cdef uint64_t releases      # counts those that left `pins`
    cdef list endings           # (fence, operation): pins that outlive their call
    cdef public list recorder   # where set: what operators need and regions that come and go, in order
    cdef uint64_t region_count  # regions so far: the number of the next one

    cdef bint stop_quietly(self)
    cdef int close_tiers(self) except -1
    cdef void forget(self, held_pin *held) noexcept
    cdef void let_go(self, held_pin *held) noexcept
    cdef void abandon(self, held_pin *held) noexcept
    cdef int end_after(self, operation, held_pin *held, fence) except -1
    cdef int wait_for_fences(self) except -1
    cdef int end_passed(self) except -1
    cdef int enter(self) except -1
    cdef int own(self, Region region) except -1
    cdef int wait(self, str what, double *started, bint *warned) except -1
    cdef int hold(self, held_pin *held) except -1
    cdef int wait_for(self, held_pin *held, int outcome, uint64_t releases) except -1
    cdef int write_down(self, pagert_region *region, uint64_t offset_bytes, uint64_t size_bytes,
                        str what) except -1
    cdef int refuse(self, int code, const pagert_pin *pin, const pagert_failure *failure) except -1
    cdef int note(self, list regions, held_pin *held) except -1

cdef class Region:
    cdef pagert_region handle
    cdef region_node *node           # the owners' together, until the last gives it to the pump
    cdef readonly Pump pump
    cdef readonly uint64_t size_bytes
    cdef uint64_t serial             # its number in the order of reservation; for recorders
    # None, or what has to `run()` before anyone looks at the bytes. It must not hold this owner, but one of its own:
    # there are no cycles here that anybody would collect.
    cdef public object deferred

    cpdef settle(self)

cdef class Pin:
    cdef held_pin *held              # owned; NULL once released
    cdef pagert_release_node *node   # for a pin that is collected without release()
    cdef Pump pump
    cdef list regions                # alive while held
    cdef readonly tuple device_bytes

    cpdef release(self)
