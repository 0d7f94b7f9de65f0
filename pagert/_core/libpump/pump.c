/* SPDX-License-Identifier: Apache-2.0
 *
 * pump: the calls that any thread may make. Each takes the lock, asks the core, and sees that somebody
 * drives if there may be transfers. A call that has to wait drives itself where it can.
 *
 * The lock is held for decisions of microseconds, never across I/O, and never while waiting for anything
 * else. Finalizers do not take it: they push onto a stack that the next locked call empties.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "../worker.h"

#define MEMORY_LINKS                                                                       \
    (1u << PAGERT_FILL | 1u << PAGERT_MOVE | 1u << PAGERT_HOST_TO_DEVICE | 1u << PAGERT_DEVICE_TO_HOST)
#define FLASH_LINKS                                                                        \
    (1u << PAGERT_FLASH_TO_DEVICE | 1u << PAGERT_FLASH_TO_HOST | 1u << PAGERT_DEVICE_TO_FLASH | \
     1u << PAGERT_HOST_TO_FLASH)

uint64_t pump_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* Something happened that a waiting caller may have waited for. */
void pump_tell_waiters(pagert_pump *pump)
{
    atomic_fetch_add_explicit(&pump->changes, 1, memory_order_relaxed);
    if (pump->waiters > 0) {
        pump_kick(pump);
        pthread_cond_broadcast(&pump->changed);
    }
}

static uint64_t deadline_after(uint64_t timeout_ns)
{
    uint64_t now = pump_now_ns();
    return now + (timeout_ns > UINT64_MAX / 4 ? UINT64_MAX / 4 : timeout_ns);
}

/* Let go of a pin; or give back a region, or put the node aside if somebody still holds it. */
static void release_node(pagert_pump *pump, pagert_release_node *node)
{
    if (node->pin != NULL) {
        pagert_unpin(pump->core, node->pin);
        free(node->pin);
        free(node);
    } else if (pagert_release(pump->core, node->region) == PAGERT_E_STATE) {
        node->next = pump->held_back;
        pump->held_back = node;
    } else {
        free(node);
    }
}

static void retry_held_back(pagert_pump *pump)
{
    pagert_release_node *node = pump->held_back;
    pump->held_back = NULL;
    while (node != NULL) {
        pagert_release_node *next = node->next;
        release_node(pump, node);
        node = next;
    }
}

void pump_drain_released(pagert_pump *pump)
{
    pagert_release_node *node = atomic_exchange_explicit(&pump->released, NULL, memory_order_acquire);
    if (node == NULL)
        return;
    bool unpinned = false;
    while (node != NULL) {
        pagert_release_node *next = node->next;
        unpinned |= node->pin != NULL;
        release_node(pump, node);
        node = next;
    }
    if (unpinned)
        retry_held_back(pump);
    pump_tell_waiters(pump);
}

uint32_t pump_look_ahead(pagert_pump *pump)
{
    return pump->leaving > 0 ? 0 : pagert_look_ahead(pump->core, LOOK_AHEAD_BACKLOG);
}

/* Let the policy fetch ahead, beside the compute. */
static void look_ahead(pagert_pump *pump)
{
    if (pump_look_ahead(pump) > 0)
        pump_kick(pump);
}

static void lock_core(pagert_pump *pump)
{
    pthread_mutex_lock(&pump->lock);
    if (atomic_load_explicit(&pump->released, memory_order_relaxed) != NULL)
        pump_drain_released(pump);
}

static void unlock_core(pagert_pump *pump) { pthread_mutex_unlock(&pump->lock); }

static void open_lane(pagert_pump *pump, uint32_t index, const pagert_engine *engine, uint32_t mask,
                      ticket *tickets, uint32_t depth, const uint64_t bytes_max[DIRECTIONS])
{
    lane *l = &pump->lanes[index];
    *l = (lane){.engine = *engine, .link_mask = mask};
    for (uint32_t i = 0; i < DIRECTIONS; i++)
        l->bytes_max[i] = bytes_max[i] > 0 ? bytes_max[i] : UINT64_MAX;
    l->unsent_end = &l->unsent;
    for (uint32_t i = 0; i < depth; i++) {
        tickets[i].lane = index;
        tickets[i].next = l->free;
        l->free = &tickets[i];
    }
}

/* What the core refuses here is the configuration: there is nothing else. */
static int open_core(pagert_pump *pump)
{
    pump->core_memory_bytes = pagert_memory_bytes(&pump->config);
    if (pump->core_memory_bytes == 0)
        return -EINVAL;
    void *memory = mmap(NULL, pump->core_memory_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return -errno;
    pump->core_memory = memory;
    return pagert_init(&pump->config, memory, pump->core_memory_bytes, &pump->core) < 0 ? -EINVAL : 0;
}

static void free_pump(pagert_pump *pump)
{
    if (pump->wake_fd >= 0)
        close(pump->wake_fd);
    if (pump->core_memory != NULL)
        munmap(pump->core_memory, pump->core_memory_bytes);
    pthread_cond_destroy(&pump->work);
    pthread_cond_destroy(&pump->changed);
    pthread_mutex_destroy(&pump->lock);
    free(pump->tickets);
    free(pump);
}

int pagert_pump_open(const pagert_pump_options *options, pagert_pump **pump_out)
{
    if (options->memory_depth == 0 || (options->flash.submit != NULL && options->flash_depth == 0))
        return -EINVAL;
    pagert_pump *pump = calloc(1, sizeof *pump);
    if (pump == NULL)
        return -ENOMEM;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&pump->changed, &attributes);
    pthread_cond_init(&pump->work, NULL);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&pump->lock, NULL);
    pump->config = options->config;
    pump->device_arena = options->device_arena;
    pump->host_arena = options->host_arena;
    uint32_t flash_depth = options->flash.submit != NULL ? options->flash_depth : 0;
    pump->tickets = calloc((size_t)options->memory_depth + flash_depth, sizeof *pump->tickets);
    pump->wake_fd = pagert_event_open();
    int code = pump->wake_fd < 0 ? pump->wake_fd : pump->tickets == NULL ? -ENOMEM : open_core(pump);
    if (code == 0) {
        static const uint64_t no_limit[DIRECTIONS];
        const uint64_t flash_max[DIRECTIONS] = {options->flash_read_bytes, options->flash_write_bytes};
        open_lane(pump, LANE_MEMORY, &options->memory, MEMORY_LINKS, pump->tickets,
                  options->memory_depth, no_limit);
        open_lane(pump, LANE_FLASH, &options->flash, FLASH_LINKS, pump->tickets + options->memory_depth,
                  flash_depth, flash_max);
        code = pagert_worker_start(&pump->thread, pump_run, pump, "pagert-pump");
    }
    if (code < 0) {
        free_pump(pump);
        return code;
    }
    *pump_out = pump;
    return 0;
}

int pagert_pump_stop(pagert_pump *pump, uint64_t timeout_ns)
{
    uint64_t deadline_ns = deadline_after(timeout_ns);
    char me;
    lock_core(pump);
    pump->stopping = true;
    while (pump->oldest != NULL && pump_step(pump, &me, deadline_ns))
        ;
    bool stopped = pump->oldest == NULL;
    pump_leave(pump, &me);
    unlock_core(pump);
    return stopped ? 0 : -ETIMEDOUT;
}

void pagert_pump_resume(pagert_pump *pump)
{
    lock_core(pump);
    pump->stopping = false;
    pump_kick(pump);
    unlock_core(pump);
}

void pagert_pump_close(pagert_pump *pump)
{
    pthread_mutex_lock(&pump->lock);
    pump->ending = true;
    pthread_cond_signal(&pump->work);
    pagert_event_signal(pump->wake_fd); /* stays readable: the thread may no longer be the driver */
    pthread_mutex_unlock(&pump->lock);
    pthread_join(pump->thread, NULL);
    pump_drain_released(pump);
    while (pump->held_back != NULL) {
        pagert_release_node *node = pump->held_back;
        pump->held_back = node->next;
        free(node);
    }
    free_pump(pump);
}

int pagert_pump_reserve(pagert_pump *pump, uint64_t size_bytes, pagert_region *region)
{
    lock_core(pump);
    int code = pagert_reserve(pump->core, size_bytes, region);
    unlock_core(pump);
    return code;
}

int pagert_pump_release(pagert_pump *pump, pagert_region region)
{
    lock_core(pump);
    int code = pagert_release(pump->core, region);
    pump_tell_waiters(pump); /* frames came free: others may go on */
    unlock_core(pump);
    return code;
}

void pagert_pump_release_later(pagert_pump *pump, pagert_release_node *node)
{
    node->next = atomic_load_explicit(&pump->released, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&pump->released, &node->next, node,
                                                  memory_order_release, memory_order_relaxed))
        ;
}

/* Wait for a pending pin. */
static int wait_pin(pagert_pump *pump, pagert_pin *pin, uint64_t timeout_ns)
{
    uint64_t start_ns = pump_now_ns(), deadline_ns = deadline_after(timeout_ns);
    char me;
    int outcome = 0;
    bool in_time = timeout_ns > 0;
    while (outcome == 0 && in_time) {
        if (pump->waiters > 0 && pagert_is_idle(pump->core)) { /* another waiting pin has to go first */
            if (pump->driver != &me)
                pump_kick(pump);
            pthread_cond_broadcast(&pump->changed);
        }
        in_time = pump_step(pump, &me, deadline_ns);
        outcome = pagert_pin_poll(pump->core, pin);
        pump->kicked = true; /* polling may have queued transfers */
    }
    pump->stall_ns += pump_now_ns() - start_ns;
    pump_leave(pump, &me);
    return outcome;
}

/* A pin that failed is let go of. Others may wait for what it held, or for what it is about to write. */
static int end_wait(pagert_pump *pump, pagert_pin *pin, int outcome)
{
    if (outcome < 0) {
        pagert_unpin(pump->core, pin);
        if (pump->held_back != NULL)
            retry_held_back(pump);
    }
    if (outcome != 0)
        pump_tell_waiters(pump);
    return outcome;
}

int pagert_pump_pin(pagert_pump *pump, pagert_pin *pin, uint64_t timeout_ns)
{
    lock_core(pump);
    int outcome = pagert_pin_start(pump->core, pin);
    if (outcome == 0)
        outcome = end_wait(pump, pin, wait_pin(pump, pin, timeout_ns));
    else if (outcome == 1)
        pump_tell_waiters(pump);
    look_ahead(pump);
    unlock_core(pump);
    return outcome;
}

int pagert_pump_pin_wait(pagert_pump *pump, pagert_pin *pin, uint64_t timeout_ns)
{
    lock_core(pump);
    int outcome = pagert_pin_poll(pump->core, pin);
    if (outcome == 0)
        outcome = wait_pin(pump, pin, timeout_ns);
    outcome = end_wait(pump, pin, outcome);
    unlock_core(pump);
    return outcome;
}

int pagert_pump_unpin(pagert_pump *pump, pagert_pin *pin)
{
    lock_core(pump);
    int code = pagert_unpin(pump->core, pin);
    if (pump->held_back != NULL)
        retry_held_back(pump);
    pump_tell_waiters(pump);
    look_ahead(pump);
    if (pump->oldest == NULL && !pagert_is_idle(pump->core))
        pump_kick(pump); /* nothing in flight would do it */
    unlock_core(pump);
    return code;
}

uint64_t pagert_pump_changes(const pagert_pump *pump)
{
    return atomic_load_explicit(&pump->changes, memory_order_relaxed);
}

void pagert_pump_wait_change(pagert_pump *pump, uint64_t seen, uint64_t timeout_ns)
{
    uint64_t deadline_ns = deadline_after(timeout_ns);
    char me;
    lock_core(pump);
    while (pagert_pump_changes(pump) == seen && pump_step(pump, &me, deadline_ns))
        ;
    pump_leave(pump, &me);
    unlock_core(pump);
}

int pagert_pump_prefetch(pagert_pump *pump, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes)
{
    lock_core(pump);
    int code = pagert_prefetch(pump->core, region, offset_bytes, size_bytes);
    pump_kick(pump);
    unlock_core(pump);
    return code < 0 ? code : 0;
}

/* Wait until asking again may tell something new. To ask walks all pages that were asked for: that is worth it once
 * half of what remained may be done, when nothing more will come, and after a failure. False: the time is over. */
static bool wait_for_half(pagert_pump *pump, const void *me, uint64_t remaining, uint64_t deadline_ns)
{
    uint64_t ended_pages = pump->ended_pages, failures = pump->failures;
    bool in_time = true;
    do
        in_time = pump_step(pump, me, deadline_ns);
    while (in_time && failures == pump->failures && 2 * (pump->ended_pages - ended_pages) < remaining &&
           !pagert_is_idle(pump->core));
    return in_time;
}

/* Ask again until nothing remains. 1: done. 0: the time is over. */
typedef int64_t attempt(pagert_pump *pump, const void *what, pagert_failure *failure);

static int repeat(pagert_pump *pump, attempt *try, const void *what, int again, uint64_t timeout_ns,
                  pagert_failure *failure)
{
    uint64_t deadline_ns = deadline_after(timeout_ns);
    char me;
    lock_core(pump);
    int64_t remaining;
    pump->leaving++;
    if (!again) /* an earlier call left at its first failure: others of its pages may have failed since */
        (void)try(pump, what, failure);
    do {
        remaining = try(pump, what, failure);
        pump->kicked = true;
    } while (remaining > 0 && wait_for_half(pump, &me, (uint64_t)remaining, deadline_ns));
    pump->leaving--;
    pump_leave(pump, &me);
    unlock_core(pump);
    return remaining < 0 ? (int)remaining : remaining == 0;
}

typedef struct range {
    pagert_region region;
    uint64_t offset_bytes, size_bytes;
} range;

static int64_t evict(pagert_pump *pump, const void *what, pagert_failure *failure)
{
    const range *r = what;
    return pagert_evict(pump->core, r->region, r->offset_bytes, r->size_bytes, failure);
}

static int64_t flush(pagert_pump *pump, const void *what, pagert_failure *failure)
{
    (void)what;
    return pagert_flush(pump->core, failure);
}

int pagert_pump_evict(pagert_pump *pump, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes,
                      int again, uint64_t timeout_ns, pagert_failure *failure)
{
    range what = {region, offset_bytes, size_bytes};
    return repeat(pump, evict, &what, again, timeout_ns, failure);
}

int pagert_pump_flush(pagert_pump *pump, int again, uint64_t timeout_ns, pagert_failure *failure)
{
    return repeat(pump, flush, NULL, again, timeout_ns, failure);
}

int pagert_pump_locate(pagert_pump *pump, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes,
                       pagert_residency *residency)
{
    lock_core(pump);
    int code = pagert_locate(pump->core, region, offset_bytes, size_bytes, residency);
    unlock_core(pump);
    return code;
}

void pagert_pump_get_state(pagert_pump *pump, pagert_pump_state *state)
{
    lock_core(pump);
    *state = (pagert_pump_state){.held_frames = pagert_held_frames(pump->core),
                                 .in_flight = pagert_in_flight(pump->core),
                                 .reserved_pages = pagert_reserved_pages(pump->core),
                                 .stall_ns = pump->stall_ns,
                                 .oldest_link = PAGERT_LINK_COUNT,
                                 .last_failed = pump->failed,
                                 .last_failed_result = pump->failed_result,
                                 .last_failed_offset = pump->failed_offset};
    pagert_get_counters(pump->core, &state->counters);
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++)
        pagert_get_usage(pump->core, tier, &state->usage[tier]);
    if (pump->oldest != NULL) {
        state->oldest_request_ns = pump_now_ns() - pump->oldest->start_ns;
        state->oldest_link = pump->oldest->transfer.link;
        state->oldest_bytes = pump->oldest->request.size_bytes;
    }
    unlock_core(pump);
}

void pagert_pump_reset_counters(pagert_pump *pump)
{
    lock_core(pump);
    pagert_reset_counters(pump->core);
    pump->stall_ns = 0;
    unlock_core(pump);
}

int pagert_pump_check(pagert_pump *pump)
{
    lock_core(pump);
    int line = pagert_check(pump->core);
    unlock_core(pump);
    return line;
}
