/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of libcore share: the page table's entry, the frames of the tiers and the core itself.
 *
 * A page has up to three copies, one in each tier. The rule from which the rest follows:
 *
 *     all valid copies of a page hold the same bytes.
 *
 * A pin that writes drops every copy but the device's before it is granted. So a page is dirty if and only
 * if its device copy is the only one, a clean page is evicted by dropping it, and "the last copy is never
 * dropped" can be checked by counting. `zero` counts as a copy: a page that was never written.
 *
 * A page takes part in one transfer at a time.
 */
#ifndef PAGERT_INTERNAL_H
#define PAGERT_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pagert/core.h"

/* Always on: a mistake of the program must not go on to lose a tensor. */
extern _Noreturn void abort(void);
#define PAGERT_ASSERT(condition) ((condition) ? (void)0 : abort())

/* The whole-state check after every call; for fuzzers and sanitizer builds. */
#ifdef PAGERT_SLOW_CHECKS
#define PAGERT_ASSERT_SLOW(core) PAGERT_ASSERT(pagert_check(core) == 0)
#else
#define PAGERT_ASSERT_SLOW(core) ((void)(core))
#endif

#define NONE PAGERT_NONE

/* A tier's copy of a page. */
enum {
    COPY_NONE,     /* the tier has no frame for the page */
    COPY_INCOMING, /* a frame is promised or assigned; the bytes are not there yet */
    COPY_VALID,    /* the frame holds the bytes */
};

/* Queues a page can stand in: one for each link, holding the transfers that may start, and one in which
 * pages wait for a host frame, first come first served. */
enum { QUEUE_HOST_WAIT = PAGERT_LINK_COUNT, QUEUE_COUNT, QUEUE_NONE = 15 };

enum {
    PAGE_LIVE = 1 << 0,         /* belongs to a region */
    PAGE_HEAD = 1 << 1,         /* first page of a live region */
    PAGE_ZERO = 1 << 2,         /* never written: its bytes are zeros, with or without a copy */
    PAGE_IN_FLIGHT = 1 << 3,    /* its transfer was handed out and has not completed */
    PAGE_LEAVING = 1 << 4,      /* gives up its device frame as soon as a copy below is valid */
    PAGE_CLEANING = 1 << 5,     /* wants a copy below, and stays */
    PAGE_LEAVING_HOST = 1 << 6, /* gives up its host frame as soon as flash has a copy */
    PAGE_OVERWRITE = 1 << 7,    /* its device frame is for a pin that writes every byte: no fetch */
    PAGE_WANTED = 1 << 8,       /* held by a pin that is being placed: may still be moved for it */
    PAGE_MOVING = 1 << 9,       /* changes its device frame to move_frame */
    PAGE_FAILED = 1 << 10,      /* held, and its transfer failed: failed_page, failed_link, error */
    PAGE_FULL = 1 << 11,        /* failed because the tiers below are full */
    PAGE_DYING = 1 << 12,       /* its region was released while its transfer was in flight */
    PAGE_EVICTABLE = 1 << 13,   /* known to the policy */
    PAGE_HOST_LIST = 3 << 14,   /* 1 + which host list the page is on; 0: on none */
    PAGE_HOST_LIST_SHIFT = 14,
    /* Free address space shares two bits with the above: they mean this without PAGE_LIVE only. */
    PAGE_EXTENT_FIRST = PAGE_HEAD, /* first page of a free run, `page_count` long */
    PAGE_EXTENT_LAST = PAGE_ZERO,  /* last page of a free run that starts at `region` */
};

/* Intrusive lists a page can be on at once; see list.h. */
enum { LIST_POLICY, LIST_HOST, LIST_QUEUE, LIST_KINDS };

typedef struct page_link {
    uint32_t older, younger;
} page_link;

typedef struct page {
    uint32_t frame[PAGERT_TIER_COUNT]; /* valid where copy[tier] != COPY_NONE */
    uint32_t region;                   /* first page of its region */
    union {                            /* a held page, which may have failed, is known to no policy: */
        page_link links[LIST_KINDS];
        uint32_t heap_index;  /* instead of links[LIST_POLICY], while it stands in a heap of the policy's */
        uint32_t failed_page; /* likewise, while PAGE_FAILED: the page whose transfer that was */
    };
    union {
        uint32_t move_frame; /* while PAGE_MOVING: the device frame it moves to */
        int32_t error;       /* while PAGE_FAILED: the result of the transfer */
    };
    uint8_t copy[PAGERT_TIER_COUNT];
    union {
        struct {
            uint8_t queue : 4;
            uint8_t failed_link : 4; /* while PAGE_FAILED */
        };
        struct {
            uint8_t : 4;
            uint8_t standing : 4; /* the policy's, while PAGE_EVICTABLE */
        };
    };
    uint16_t flags;
    uint16_t holds; /* pins that hold the page */
    /* Of a region's first page only, and of a free run's: */
    uint32_t generation; /* survives release, so that a stale handle is refused */
    uint32_t page_count;
    uint32_t tail_bytes; /* bytes of the region in its last page; after release: pages still in flight */
} page;
_Static_assert(sizeof(page) == 64, "the page table costs 64 bytes a page");
_Static_assert(LIST_POLICY == 0, "heap_index and failed_page lie where links[LIST_POLICY] does, not another list's");

typedef struct page_list {
    uint32_t oldest, youngest, count;
} page_list;

/* A device frame. A frame whose page is on its way out may be promised to the page that comes next. */
typedef struct device_frame {
    uint32_t page; /* who has it, or NONE */
    uint32_t heir; /* who gets it when `page` is gone, or NONE */
} device_frame;

/* Which frames of a tier are used: bits in levels of 64, a bit above is set where the word below is full.
 * All zero is the empty set, so that untouched memory need not be written. */
#define FRAME_SET_LEVELS 6
typedef struct frame_set {
    uint64_t *level[FRAME_SET_LEVELS];
    uint32_t level_count, frame_count, used_count, peak_count;
    uint32_t cursor; /* where the search for a free frame goes on, so that neighbours come in order */
} frame_set;

/* The available device frames, those free or being vacated: a bit each, and a tree over the words that knows the
 * longest run. */
typedef struct run_node {
    uint32_t prefix, suffix, longest; /* available frames in a row: at either end, and at most */
} run_node;
typedef struct frame_runs {
    uint64_t *words, *stale;
    run_node *nodes;
    uint32_t frame_count, leaf_count;
} frame_runs;

/* A writeback that failed, to be told to whoever asked for it. */
typedef struct failed_writeback {
    uint32_t page; /* that is still dirty, or NONE */
    bool full;
    pagert_failure failure; /* why: the transfer that failed may be another page's */
} failed_writeback;

#define EXTENT_CLASSES 264 /* 33 powers of two, 8 steps each */

/* Host copies by what dropping one costs, cheapest first. */
enum {
    HOST_SHADOW, /* the device has a copy too: free */
    HOST_ONLY,   /* the fastest copy; oldest first */
    HOST_SOURCE, /* waits to be copied to the device: dropped last, it would be fetched again at once */
    HOST_LISTS,
};

struct pagert_core {
    pagert_config config;
    uint32_t page_shift;
    uint32_t lower_tier;   /* the tier that device pages are written back to */
    page *pages;           /* config.page_count of them */
    device_frame *frames;  /* frame_count[PAGERT_DEVICE] of them */
    frame_set sets[PAGERT_TIER_COUNT];
    frame_runs runs;
    page_list queues[QUEUE_COUNT];
    page_list host_lists[HOST_LISTS];
    uint32_t host_leaving;     /* pages with PAGE_LEAVING_HOST */
    uint32_t host_in_transfer; /* host copies whose page stands in a link's queue or is in flight */
    uint32_t move_in_transfer; /* pages whose MOVE stands in its queue or is in flight */
    uint32_t vacating;         /* device frames of leaving pages, promised to nobody */
    uint32_t last_vacated;     /* the frame of the last page that began to leave; a hint */
    uint32_t moving;           /* pages with PAGE_MOVING */
    uint32_t held_frames;      /* device frames of held pages */
    pagert_pin *unready;       /* pins that were started and are pending, or failed */
    pagert_pin *repacker;      /* the one of them that repack.c works for, or NULL */
    uint32_t in_flight;        /* transfers handed out */
    uint32_t reclaim_cursor;   /* device frame where the search for a spare flash copy goes on */
    bool write_ahead_failed;   /* no more of it until a writeback succeeds */
    bool flushing;             /* a flush goes on: host copies of dirty pages go to flash, not away */
    failed_writeback flush_failed; /* of a page that flush or evict asked for by name */
    uint64_t reserved_pages;
    struct {
        page_list free[EXTENT_CLASSES];
        uint64_t non_empty[(EXTENT_CLASSES + 63) / 64];
    } extents;
    const pagert_policy *policy;
    void *policy_state;
    pagert_counters counters;
};

/* What a victim is wanted for. */
typedef struct victim_need {
    uint32_t time;   /* of a fetch ahead of time, on the policy's clock: none that is used before; else 0 */
    bool optional;   /* it only saves moves: none that is planned to stay */
    bool clean_only; /* one that needs no writeback */
} victim_need;

/* An eviction policy: one file behind this table. It is told which pages could be evicted, and asked who goes. */
struct pagert_policy {
    const char *name;
    uint64_t (*state_bytes)(const pagert_config *config); /* memory it needs, zeroed at the start */
    void (*init)(pagert_core *core);
    void (*insert)(pagert_core *core, uint32_t page_index); /* now evictable, and most recently used */
    void (*remove)(pagert_core *core, uint32_t page_index); /* held, moved or gone */
    uint32_t (*victim)(pagert_core *core, victim_need need); /* the best, which stays known until remove(), or NONE */
    uint32_t (*evictable_count)(const pagert_core *core);
    /* The rest may be NULL. What a policy hears of, for those that learn: see TELL(). Of regions, */
    void (*reserved)(pagert_core *core, uint32_t first_page, uint32_t page_count);
    void (*released)(pagert_core *core, uint32_t first_page);
    /* of pins, */
    void (*accessed)(pagert_core *core, const pagert_pin *pin);    /* an operator asks for it */
    void (*making_room)(pagert_core *core, const pagert_pin *pin); /* its pages are held */
    void (*begun)(pagert_core *core, const pagert_pin *pin);       /* it has to wait */
    void (*placed)(pagert_core *core, pagert_pin *pin);
    void (*let_go)(pagert_core *core, const pagert_pin *pin);
    /* of pages, */
    void (*changed)(pagert_core *core, uint32_t index); /* anything may have, and the copies are as they are now */
    void (*written)(pagert_core *core, uint32_t index); /* it is about to be; changed() follows */
    void (*not_overwritten)(pagert_core *core, uint32_t index); /* it is fetched after all */
    void (*sent_away)(pagert_core *core, uint32_t index);       /* it leaves, and not as a victim */
    void (*copy_lost)(pagert_core *core, uint32_t index);       /* the one below, for lack of room */
    /* and of all. */
    void (*flushed)(pagert_core *core);
    void (*transferred)(pagert_core *core, uint32_t link, uint32_t page_count);
    /* What it does ahead of time. */
    bool (*upcoming)(pagert_core *core, uint32_t *first_page, uint32_t *page_count, uint32_t *time);
    void (*fetched)(pagert_core *core); /* that is on its way now */
    uint32_t (*leaver)(pagert_core *core);   /* a clean page that is best evicted now, or NONE */
    uint32_t (*writable)(pagert_core *core); /* a dirty page that is best written now, or NONE */
    /* Pages whose fastest copy is the host's, as above; the victim stays known until host_remove(). */
    void (*host_insert)(pagert_core *core, uint32_t index);
    void (*host_remove)(pagert_core *core, uint32_t index);
    uint32_t (*host_victim)(pagert_core *core);
    int (*check)(const pagert_core *core); /* as pagert_check(), of its own state */
};

/* TELL(core, written, core, index): the policy, if it wants to hear of that. */
#define TELL(core, event, ...)                         \
    do {                                                \
        if ((core)->policy->event != NULL)             \
            (core)->policy->event(__VA_ARGS__);        \
    } while (0)

/* The policies there are. */
extern const pagert_policy policy_lru, policy_lookahead;

static inline bool has(const page *p, uint32_t flag) { return (p->flags & flag) != 0; }
static inline void set_flag(page *p, uint32_t flag) { p->flags = (uint16_t)(p->flags | flag); }
static inline void clear_flag(page *p, uint32_t flag) { p->flags = (uint16_t)(p->flags & ~flag); }
static inline bool configured(const pagert_core *core, uint32_t tier)
{
    return core->config.frame_count[tier] != 0;
}
/* A copy below the device, or zero: the device copy may be dropped. */
static inline bool is_clean(const page *p)
{
    return has(p, PAGE_ZERO) || p->copy[PAGERT_HOST] == COPY_VALID || p->copy[PAGERT_FLASH] == COPY_VALID;
}

/* frame_set.c */
uint64_t frame_set_words(uint32_t frame_count);
void frame_set_init(frame_set *set, uint32_t frame_count, uint64_t *words);
bool frame_set_contains(const frame_set *set, uint32_t frame);
uint32_t frame_set_next_free(const frame_set *set, uint32_t from); /* at or after, or NONE */
void frame_set_add(frame_set *set, uint32_t frame);
void frame_set_remove(frame_set *set, uint32_t frame);
uint32_t frame_set_take(frame_set *set); /* a free frame, next in order; NONE if there is none */
static inline uint32_t frame_set_free_count(const frame_set *set) { return set->frame_count - set->used_count; }

/* frame_runs.c */
uint64_t frame_runs_bytes(uint32_t frame_count);
void frame_runs_init(frame_runs *runs, uint32_t frame_count, void *memory); /* all are available */
bool frame_runs_contains(const frame_runs *runs, uint32_t frame);
void frame_runs_set(frame_runs *runs, uint32_t frame, bool available);
uint32_t frame_runs_find(frame_runs *runs, uint32_t count);           /* the first run, or NONE */
uint32_t frame_runs_next(const frame_runs *runs, uint32_t from); /* the first at or after, or NONE */

/* extents.c */
void extents_init(pagert_core *core);
uint32_t extents_take(pagert_core *core, uint32_t page_count); /* first page, or NONE */
void extents_give(pagert_core *core, uint32_t first_page, uint32_t page_count);

/* page.c: what one page does next */
void page_advance(pagert_core *core, uint32_t index);
void page_relist(pagert_core *core, uint32_t index);
void page_enqueue(pagert_core *core, uint32_t index, uint32_t queue);
void page_take_off(pagert_core *core, uint32_t index);
void page_leave_queue(pagert_core *core, uint32_t index);
bool page_cancel_queued(pagert_core *core, uint32_t index);
void page_start_leaving(pagert_core *core, uint32_t index);
bool page_stay(pagert_core *core, uint32_t index);
void page_commit_write(pagert_core *core, uint32_t index);
void page_drop_lower(pagert_core *core, uint32_t index, uint32_t tier);
void page_purge(pagert_core *core, uint32_t index);

/* device.c: who has which device frame, and who gets it next */
void device_assign(pagert_core *core, uint32_t index, uint32_t frame, bool overwrite);
void device_forget(pagert_core *core, uint32_t index);
void device_start_move(pagert_core *core, uint32_t index, uint32_t target_frame);
void device_finish_move(pagert_core *core, uint32_t index);
void device_cancel_move(pagert_core *core, uint32_t index);
void device_offer(pagert_core *core, uint32_t frame);
void device_withdraw(pagert_core *core, uint32_t frame);
static inline bool device_owns(const pagert_core *core, uint32_t index)
{
    return core->frames[core->pages[index].frame[PAGERT_DEVICE]].page == index;
}

/* lower.c: frames of the tiers below the device */
uint32_t lower_take_flash(pagert_core *core);
void lower_grant_host(pagert_core *core);
void lower_fail_waiter(pagert_core *core, const pagert_failure *cause);
void lower_end_leaving_host(pagert_core *core, uint32_t index);

/* fail.c: what a failed transfer undoes */
bool fail_page(pagert_core *core, uint32_t index, const pagert_failure *failure, bool full);
void fail_writeback(pagert_core *core, uint32_t index, const pagert_failure *failure, bool full);
void fail_move(pagert_core *core, uint32_t index, const pagert_failure *failure);

/* place.c, repack.c: find or make room for windows */
enum { PLACE_DONE = 1, PLACE_BUSY = 0, PLACE_BLOCKED = -100 };
enum { FRAME_FREE, FRAME_VACATING, FRAME_MOVABLE, FRAME_BUSY, FRAME_HELD };
int frame_class(const pagert_core *core, uint32_t frame);
bool is_quiet(const pagert_core *core);
int place_make_room(pagert_core *core, pagert_pin *pin, uint64_t frames_needed);
int place_window(pagert_core *core, pagert_pin *pin, const pagert_access *access);
int repack_round(pagert_core *core, pagert_pin *pin);
bool repack_fits_alone(const pagert_core *core, pagert_pin *pin);

/* pin.c */
void pin_fail_waiters(pagert_core *core, const pagert_failure *failure, bool full);
int pin_prefetch(pagert_core *core, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes,
                 uint32_t needed_at);
bool pin_is_waited_for(const pagert_core *core);

/* core.c */
void region_page_gone(pagert_core *core, uint32_t index);

/* access.c: ranges of regions */
int region_pages(const pagert_core *core, pagert_region region, uint64_t offset_bytes,
                 uint64_t size_bytes, uint32_t *first_page, uint32_t *page_count);
bool access_overwrites(const pagert_core *core, const pagert_access *access, uint32_t index);
bool pin_covers(const pagert_pin *pin, uint32_t index);
bool pin_overwrites(const pagert_core *core, const pagert_pin *pin, uint32_t index);

#endif
