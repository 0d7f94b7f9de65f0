/* SPDX-License-Identifier: Apache-2.0
 *
 * libcore: decides which page lies in which frame of which tier, and never acts on it.
 *
 * It owns the page table, the frames of every tier, the eviction policy and the queues of transfers.
 * It does no I/O, has no threads, no clock and no globals, and allocates nothing: the caller supplies
 * the memory, serialises the calls, carries out what pagert_next_transfer() hands out and reports each
 * transfer once through pagert_complete(). The same code runs under the pump, in the simulator and in
 * the exhaustive tests.
 *
 * Conventions. A call returns 0 or a positive value, or one of PAGERT_E_*; results come through
 * out-pointers, which stay untouched on error. Mistakes of the program abort (PAGERT_ASSERT).
 */
#ifndef PAGERT_CORE_H
#define PAGERT_CORE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PAGERT_NONE UINT32_MAX /* no page, no frame */

/* Errors of the core. They never mix with errno: engines report that, and it travels as data. */
enum {
    PAGERT_E_ARGUMENT = -1,  /* a value out of range: sizes, counts, an offset outside its region */
    PAGERT_E_STALE = -2,     /* the region was released, or never existed */
    PAGERT_E_PAGES = -3,     /* no run of free virtual pages is long enough */
    PAGERT_E_FRAMES = -4,    /* unheld device frames do not suffice, or held windows lie in the way */
    PAGERT_E_FULL = -5,      /* victims are dirty and the tiers below have no frame left */
    PAGERT_E_STATE = -6,     /* a pin started while it is held, or released twice, a region released while held */
    PAGERT_E_TRANSFER = -7,  /* a transfer failed; pagert_pin.failure says which and why */
};

/* Tiers, fastest first. Bytes move between neighbouring configured tiers only. */
enum { PAGERT_DEVICE, PAGERT_HOST, PAGERT_FLASH, PAGERT_TIER_COUNT };

/* How an operator uses the bytes it pins. */
enum {
    PAGERT_READ,      /* as they are */
    PAGERT_UPDATE,    /* read and written: copies on lower tiers become stale */
    PAGERT_OVERWRITE, /* every byte is written: nothing need be fetched */
};

/* Links a transfer can take. FILL writes zeros and has no source. MOVE makes room for a window. */
enum {
    PAGERT_FILL,
    PAGERT_MOVE,
    PAGERT_HOST_TO_DEVICE,
    PAGERT_FLASH_TO_DEVICE,
    PAGERT_FLASH_TO_HOST,
    PAGERT_DEVICE_TO_HOST,
    PAGERT_DEVICE_TO_FLASH,
    PAGERT_HOST_TO_FLASH,
    PAGERT_LINK_COUNT,
};

typedef struct pagert_core pagert_core;
typedef struct pagert_policy pagert_policy;

/* The eviction policy of that name, or NULL: "lru" (least recently used) or "lookahead" (learns the step, evicts
 * what is used furthest ahead). And the name of each policy, by number from 0; NULL: there are no more. */
const pagert_policy *pagert_policy_named(const char *name);
const char *pagert_policy_name(uint32_t number);

typedef struct pagert_config {
    uint64_t page_bytes;                     /* a power of two, a multiple of 4096 */
    uint32_t page_count;                     /* virtual pages, at most UINT32_MAX - 1 */
    uint32_t frame_count[PAGERT_TIER_COUNT]; /* 0: the tier is not configured. Device and one more are */
    uint32_t transfer_pages_max;             /* neighbouring pages joined into one transfer, at least 1 */
    const pagert_policy *policy;
} pagert_config;

/* Bytes of memory that a core of this configuration needs; 0 if the configuration is invalid.
 * At most 64 bytes a virtual page and 12 bytes a frame, plus a small constant. With lookahead 9 bytes more a
 * virtual page, 40 more a device frame, 29 a host frame, and 24 MiB for what it remembers. */
uint64_t pagert_memory_bytes(const pagert_config *config);

/* Build a core in `memory`, which is zeroed, 64-byte aligned and stays the caller's. Zeroed memory is
 * the initial state, so a lazily mapped range costs only what is touched: no call walks all pages. */
int pagert_init(const pagert_config *config, void *memory, uint64_t memory_bytes, pagert_core **core);

/* A region: a contiguous range of virtual pages. The generation lets a stale handle be refused. */
typedef struct pagert_region {
    uint32_t first_page;
    uint32_t generation;
} pagert_region;

/* Reserve a region of at least `size_bytes` (> 0). Its pages are zero: no frame, no I/O. O(pages) of the
 * region, whose entries in the page table it writes. */
int pagert_reserve(pagert_core *core, uint64_t size_bytes, pagert_region *region);

/* Release a region; its bytes are gone at once, its pages as soon as no transfer touches them.
 * PAGERT_E_STATE until every pin that was started on it is let go of. */
int pagert_release(pagert_core *core, pagert_region region);

/* One range of one region that a pin holds. */
typedef struct pagert_access {
    pagert_region region;
    uint64_t offset_bytes; /* from the region's start */
    uint64_t size_bytes;   /* > 0 */
    uint32_t mode;         /* PAGERT_READ, _UPDATE or _OVERWRITE. A page that an overwrite covers only
                              in part is updated instead; the region's end counts as a page's end */
    uint32_t first_page;   /* out, set by pagert_pin_start(): first virtual page */
    uint32_t page_count;   /* out, likewise */
    uint32_t base_frame;   /* the core's: where a layout for the whole pin puts the window, or PAGERT_NONE */
    uint64_t device_bytes; /* out, set once ready: offset in the device arena of byte offset_bytes */
    uint32_t span_first, span_count; /* the core's: pages that must lie in one window, with those of
                                        accesses that overlap; 0 where another access stands for them */
} pagert_access;

typedef struct pagert_failure {
    uint32_t page;    /* virtual page whose transfer failed, which need not be one that was asked for:
                         others leave to make room. With PAGERT_E_FULL, the one that found no frame */
    uint32_t link;    /* PAGERT_FILL ... */
    int32_t result;   /* what pagert_complete() was told, or PAGERT_E_FULL */
} pagert_failure;

/* Everything that one operator needs at once. The caller owns it and its accesses, and keeps both where they
 * are until it is let go of: by pagert_unpin(), or by an error of pagert_pin_start(). From then on it may be
 * started again as it is. Fill the first two fields and zero the rest. */
typedef struct pagert_pin {
    pagert_access *accesses;
    uint32_t access_count;
    uint32_t state;                        /* the core's from here on */
    uint32_t access_cursor, page_cursor;   /* pages before the cursor are known to be ready */
    uint32_t begun;                        /* the core's: 1 once room was being made for it */
    pagert_failure failure;                /* valid after PAGERT_E_TRANSFER or PAGERT_E_FULL */
    int32_t code;                          /* how it failed */
    uint64_t hits, faults;                 /* pages it found resident, and others; counted once it is ready */
    uint64_t frames_needed, frames_unheld; /* valid after PAGERT_E_FRAMES */
    struct pagert_pin *next, *previous;    /* the core's: pins that are pending or failed */
    uint32_t use;                          /* the core's: which use of pages it was */
    uint32_t needed_at;                    /* the core's: of a fetch ahead of time, when its operator comes; else 0 */
} pagert_pin;

/* Ask for every access of `pin` to be resident, each in one window, all at once or not at all.
 * 1: ready, addresses are set. 0: pending, transfers must complete first; then pagert_pin_poll().
 * PAGERT_E_FRAMES, PAGERT_E_FULL, PAGERT_E_STALE, PAGERT_E_ARGUMENT: nothing is held. PAGERT_E_FRAMES comes
 * at once where the frames do not suffice or no place exists for a single window; where several windows get
 * in each other's way it may take transfers to find out.
 * Pages of one region that several accesses share are best merged into one access by the caller:
 * held windows do not move. */
int pagert_pin_start(pagert_core *core, pagert_pin *pin);

/* 1: ready. 0: still pending. Negative: the pin failed; pagert_unpin() it. Amortised O(pages).
 * A pin that is pending because pages it needs are in a transfer holds no frames yet: other pins may come
 * first, and its poll may still end in any error of pagert_pin_start(), or in PAGERT_E_TRANSFER where room
 * could not be made. Poll all that are pending after a transfer completed, after a pin became ready, failed
 * or was let go of, and when a poll leaves the core idle: it may have withdrawn what they waited for. */
int pagert_pin_poll(pagert_core *core, pagert_pin *pin);

/* Let go of a pin that was started: ready, pending or failed. Pages that were still being fetched stay
 * resident when they arrive. PAGERT_E_STATE if it is not held. */
int pagert_unpin(pagert_core *core, pagert_pin *pin);

/* Start the fetch of a range, evicting as a pin would, without holding it. A hint: 1 if everything is
 * resident or on its way, 0 if there was no room, or an error as for a pin. */
int pagert_prefetch(pagert_core *core, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes);

/* Do ahead of time what the policy expects to be needed: evict pages that will go and cost no transfer; start the
 * fetch of what comes next, nearest use first, never evicting a page that is needed sooner, while fewer than
 * `backlog_max` pages wait for their fetch to start; start to write dirty pages that will go, while little is in
 * flight. How many pages were started; 0 with a policy that expects nothing, and while a pin waits for room. Call
 * it when a pin was granted or let go of and when a transfer has completed. */
uint32_t pagert_look_ahead(pagert_core *core, uint32_t backlog_max);

/* Leave the device: start eviction of the range's unheld pages. Returns how many pages of the range
 * are still on the device; call again after transfers completed until it is 0. PAGERT_E_STATE where a
 * page is held; PAGERT_E_FULL, PAGERT_E_TRANSFER where a writeback failed, once, with `failure` set. */
int64_t pagert_evict(pagert_core *core, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes,
                     pagert_failure *failure);

/* Make device pages clean: start writeback of dirty unheld pages, which stay resident. Returns how many
 * dirty unheld pages remain; call again after transfers completed until it is 0. O(device frames). */
int64_t pagert_flush(pagert_core *core, pagert_failure *failure);

/* One transfer: `page_count` pages, contiguous in the region and in both tiers. It is a value: hand the
 * same one back to pagert_complete(). */
typedef struct pagert_transfer {
    uint32_t link;
    uint32_t first_page;
    uint32_t page_count;
    uint32_t source_frame; /* PAGERT_NONE for FILL */
    uint32_t target_frame;
} pagert_transfer;

/* The next transfer that may start now on one of the links in `link_mask` (bit 1 << link).
 * 1: `transfer` is set and counts as in flight. 0: none is ready. */
int pagert_next_transfer(pagert_core *core, uint32_t link_mask, pagert_transfer *transfer);

/* Report the end of a transfer: `result` is 0, or a negative number that is handed through to whoever
 * waits for these pages. A failed writeback leaves the pages where they are, dirty. */
int pagert_complete(pagert_core *core, const pagert_transfer *transfer, int32_t result);

/* Where the pages of a range lie, counted by fastest valid copy; a page that was never written is
 * `zero`. The sum is the number of pages of the range. */
typedef struct pagert_residency {
    uint64_t zero, pages[PAGERT_TIER_COUNT];
} pagert_residency;
int pagert_locate(pagert_core *core, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes,
                  pagert_residency *residency);

/* Counters, in pages unless said otherwise. A page that one pin needs counts once as hit or fault. */
typedef struct pagert_counters {
    uint64_t hits, faults;       /* pages found resident; pages that had to be brought or made */
    uint64_t evictions;          /* pages that gave up their device frame to another page */
    uint64_t prefetches;         /* pages fetched before a pin asked for them */
    uint64_t transferred[PAGERT_LINK_COUNT]; /* pages whose transfer succeeded */
    uint64_t transfers[PAGERT_LINK_COUNT];   /* successful transfers: joined pages count as one */
    uint64_t failed_transfers;
    uint64_t lru_moved;          /* pages that LRU would have moved to the device and from it, where the policy
                                    holds itself to that; else 0 */
} pagert_counters;

typedef struct pagert_usage {
    uint32_t capacity_frames, used_frames, peak_frames; /* used + free == capacity */
} pagert_usage;

void pagert_get_counters(const pagert_core *core, pagert_counters *counters);
void pagert_get_usage(const pagert_core *core, uint32_t tier, pagert_usage *usage);
uint32_t pagert_held_frames(const pagert_core *core);     /* device frames that pins hold */
uint64_t pagert_reserved_pages(const pagert_core *core);  /* virtual pages of live regions */
uint32_t pagert_in_flight(const pagert_core *core);       /* transfers handed out, not completed */
int pagert_is_idle(const pagert_core *core);              /* 1: nothing in flight, and nothing wants to be */
void pagert_reset_counters(pagert_core *core);            /* peaks fall to what is used now */

/* One page as the page table has it; for tests, traces and messages. */
enum {
    PAGERT_PAGE_ZERO,         /* never written: reads as zeros, lies nowhere */
    PAGERT_PAGE_ABSENT,       /* not on the device; the bytes lie on a lower tier */
    PAGERT_PAGE_FETCHING,     /* a device frame is promised or being filled */
    PAGERT_PAGE_RESIDENT,     /* the device frame holds the bytes */
    PAGERT_PAGE_WRITING_BACK, /* resident, and a copy to the tier below is wanted or in flight */
    PAGERT_PAGE_FREE,         /* belongs to no region */
};
typedef struct pagert_page_info {
    uint32_t state;
    uint32_t frame[PAGERT_TIER_COUNT]; /* PAGERT_NONE where the tier holds no valid copy */
    uint32_t holds;                    /* pins that hold it */
    uint32_t dirty;                    /* 1: the device copy is the only one */
} pagert_page_info;
int pagert_page(const pagert_core *core, uint32_t page, pagert_page_info *info);

/* Verify the whole state; 0, or the line of the first check that failed. O(pages). For tests. */
int pagert_check(const pagert_core *core);

#ifdef __cplusplus
}
#endif
#endif
