# SPDX-License-Identifier: Apache-2.0
# Mirrors include/pagert/core.h: same names, same order.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "pagert/core.h" nogil:
    const uint32_t PAGERT_NONE

    enum:
        PAGERT_E_ARGUMENT
        PAGERT_E_STALE
        PAGERT_E_PAGES
        PAGERT_E_FRAMES
        PAGERT_E_FULL
        PAGERT_E_STATE
        PAGERT_E_TRANSFER

    enum:
        PAGERT_DEVICE
        PAGERT_HOST
        PAGERT_FLASH
        PAGERT_TIER_COUNT

    enum:
        PAGERT_READ
        PAGERT_UPDATE
        PAGERT_OVERWRITE

    enum:
        PAGERT_FILL
        PAGERT_MOVE
        PAGERT_HOST_TO_DEVICE
        PAGERT_FLASH_TO_DEVICE
        PAGERT_FLASH_TO_HOST
        PAGERT_DEVICE_TO_HOST
        PAGERT_DEVICE_TO_FLASH
        PAGERT_HOST_TO_FLASH
        PAGERT_LINK_COUNT

    ctypedef struct pagert_core:
        pass
    ctypedef struct pagert_policy:
        pass

    const pagert_policy *pagert_policy_named(const char *name)
    const char *pagert_policy_name(uint32_t number)

    ctypedef struct pagert_config:
        uint64_t page_bytes
        uint32_t page_count
        uint32_t frame_count[3]
        uint32_t transfer_pages_max
        const pagert_policy *policy

    uint64_t pagert_memory_bytes(const pagert_config *config)

    int pagert_init(const pagert_config *config, void *memory, uint64_t memory_bytes,
                    pagert_core **core)

    ctypedef struct pagert_region:
        uint32_t first_page
        uint32_t generation

    int pagert_reserve(pagert_core *core, uint64_t size_bytes, pagert_region *region)

    int pagert_release(pagert_core *core, pagert_region region)

    ctypedef struct pagert_access:
        pagert_region region
        uint64_t offset_bytes
        uint64_t size_bytes
        uint32_t mode
        uint32_t first_page
        uint32_t page_count
        uint32_t base_frame
        uint64_t device_bytes
        uint32_t span_first
        uint32_t span_count

    ctypedef struct pagert_failure:
        uint32_t page
        uint32_t link
        int32_t result

    ctypedef struct pagert_pin:
        pagert_access *accesses
        uint32_t access_count
        uint32_t state
        uint32_t access_cursor
        uint32_t page_cursor
        uint32_t begun
        pagert_failure failure
        int32_t code
        uint64_t hits
        uint64_t faults
        uint64_t frames_needed
        uint64_t frames_unheld
        pagert_pin *next
        pagert_pin *previous
        uint32_t use
        uint32_t needed_at

    int pagert_pin_start(pagert_core *core, pagert_pin *pin)

    int pagert_pin_poll(pagert_core *core, pagert_pin *pin)

    int pagert_unpin(pagert_core *core, pagert_pin *pin)

    int pagert_prefetch(pagert_core *core, pagert_region region, uint64_t offset_bytes,
                        uint64_t size_bytes)

    uint32_t pagert_look_ahead(pagert_core *core, uint32_t backlog_max)

    int64_t pagert_evict(pagert_core *core, pagert_region region, uint64_t offset_bytes,
                         uint64_t size_bytes, pagert_failure *failure)

    int64_t pagert_flush(pagert_core *core, pagert_failure *failure)

    ctypedef struct pagert_transfer:
        uint32_t link
        uint32_t first_page
        uint32_t page_count
        uint32_t source_frame
        uint32_t target_frame

    int pagert_next_transfer(pagert_core *core, uint32_t link_mask, pagert_transfer *transfer)

    int pagert_complete(pagert_core *core, const pagert_transfer *transfer, int32_t result)

    ctypedef struct pagert_residency:
        uint64_t zero
        uint64_t pages[3]

    int pagert_locate(pagert_core *core, pagert_region region, uint64_t offset_bytes,
                      uint64_t size_bytes, pagert_residency *residency)

    ctypedef struct pagert_counters:
        uint64_t hits
        uint64_t faults
        uint64_t evictions
        uint64_t prefetches
        uint64_t transferred[8]
        uint64_t transfers[8]
        uint64_t failed_transfers
        uint64_t lru_moved

    ctypedef struct pagert_usage:
        uint32_t capacity_frames
        uint32_t used_frames
        uint32_t peak_frames

    void pagert_get_counters(const pagert_core *core, pagert_counters *counters)
    void pagert_get_usage(const pagert_core *core, uint32_t tier, pagert_usage *usage)
    uint32_t pagert_held_frames(const pagert_core *core)
    uint64_t pagert_reserved_pages(const pagert_core *core)
    uint32_t pagert_in_flight(const pagert_core *core)
    int pagert_is_idle(const pagert_core *core)
    void pagert_reset_counters(pagert_core *core)

    enum:
        PAGERT_PAGE_ZERO
        PAGERT_PAGE_ABSENT
        PAGERT_PAGE_FETCHING
        PAGERT_PAGE_RESIDENT
        PAGERT_PAGE_WRITING_BACK
        PAGERT_PAGE_FREE

    ctypedef struct pagert_page_info:
        uint32_t state
        uint32_t frame[3]
        uint32_t holds
        uint32_t dirty

    int pagert_page(const pagert_core *core, uint32_t page, pagert_page_info *info)

    int pagert_check(const pagert_core *core)


cdef class Core:
    cdef pagert_core *_handle    # lies in the memory below
    cdef void *_memory           # owned, mapped
    cdef uint64_t _mapped_bytes
    cdef readonly uint64_t memory_bytes
