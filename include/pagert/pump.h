/* SPDX-License-Identifier: Apache-2.0
 *
 * The pump carries the core's transfers out: it takes them from libcore, gives them to the engines and
 * reports their completions, on a thread of its own beside the compute, or on a thread that waits in a call
 * anyway. Here alone lives the core's lock: every call below may be made from any thread,
 * and none of them needs the GIL. An engine is called by one thread at a time, but not always the same.
 *
 * Waits take a time limit and return when it is over, so that the caller can look for Ctrl-C and for its
 * own deadline, and call again.
 */
#ifndef PAGERT_PUMP_H
#define PAGERT_PUMP_H

#include <stdint.h>

#include "pagert/engine.h"
#include "pagert/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pagert_pump pagert_pump;

typedef struct pagert_pump_options {
    pagert_config config;
    void *device_arena;    /* frame_count[PAGERT_DEVICE] * page_bytes; the caller's, outlives the pump */
    void *host_arena;      /* likewise, or NULL without a host tier */
    pagert_engine memory;  /* FILL and COPY */
    pagert_engine flash;   /* READ and WRITE; submit is NULL without a flash tier */
    uint32_t memory_depth; /* requests in flight at each engine at once, at least 1 */
    uint32_t flash_depth;
    /* Bytes in flight at the flash engine, read and written, at which no more of the kind are given to it; 0: no
     * limit. Apart, so that a fetch never waits for a writeback before it can start. */
    uint64_t flash_read_bytes, flash_write_bytes;
} pagert_pump_options;

/* 0 or -errno; -EINVAL: the options do not make sense. Never one of PAGERT_E_*, whose numbers overlap. */
int pagert_pump_open(const pagert_pump_options *options, pagert_pump **pump);

/* Start no transfer any more, and wait until those in flight have come back. 0, or -ETIMEDOUT: an engine
 * still has requests after `timeout_ns`. Calls that wait for transfers go on waiting: resume() lets the
 * pump go on, after either result. */
int pagert_pump_stop(pagert_pump *pump, uint64_t timeout_ns);
void pagert_pump_resume(pagert_pump *pump);

/* Free everything. stop() has returned 0, and no other call is under way. */
void pagert_pump_close(pagert_pump *pump);

/* As pagert_reserve() and pagert_release(). */
int pagert_pump_reserve(pagert_pump *pump, uint64_t size_bytes, pagert_region *region);
int pagert_pump_release(pagert_pump *pump, pagert_region region);

/* Release from a finalizer: takes no lock and allocates nothing. The pump does it at its next locked call,
 * then frees `pin` and the node with free(3). A region that is still held is released after its last unpin.
 * With `pin` set, that pin is let go and the region does not count. */
typedef struct pagert_release_node {
    pagert_region region;
    pagert_pin *pin;
    struct pagert_release_node *next;
} pagert_release_node;
void pagert_pump_release_later(pagert_pump *pump, pagert_release_node *node);

/* Start a pin and wait up to `timeout_ns` for it. 1: ready. 0: still pending, go on with _wait(): only from
 * then on its transfers are sure to start. Negative: the pin's failure, nothing is held any more. */
int pagert_pump_pin(pagert_pump *pump, pagert_pin *pin, uint64_t timeout_ns);
int pagert_pump_pin_wait(pagert_pump *pump, pagert_pin *pin, uint64_t timeout_ns);
int pagert_pump_unpin(pagert_pump *pump, pagert_pin *pin);

/* Wait until something happened since `seen` was the number of changes: a pin became ready or was let go of,
 * a region was released, transfers completed. Or the time is over. */
uint64_t pagert_pump_changes(const pagert_pump *pump);
void pagert_pump_wait_change(pagert_pump *pump, uint64_t seen, uint64_t timeout_ns);

/* Start the fetch of a range without waiting or holding. 0 or an error as for a pin. */
int pagert_pump_prefetch(pagert_pump *pump, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes);

/* Wait until a range has left the device, or until every dirty page is written back. 1: done. 0: not yet
 * after `timeout_ns`: call again, with `again` set. Negative: an error; `failure` (may be NULL) says which
 * transfer. */
int pagert_pump_evict(pagert_pump *pump, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes,
                      int again, uint64_t timeout_ns, pagert_failure *failure);
int pagert_pump_flush(pagert_pump *pump, int again, uint64_t timeout_ns, pagert_failure *failure);

int pagert_pump_locate(pagert_pump *pump, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes,
                       pagert_residency *residency);

typedef struct pagert_pump_state {
    pagert_counters counters;
    pagert_usage usage[PAGERT_TIER_COUNT];
    uint32_t held_frames;
    uint32_t in_flight;
    uint64_t reserved_pages;
    uint64_t stall_ns;          /* time that callers spent waiting in pin and pin_wait */
    uint64_t oldest_request_ns; /* age of the oldest request in flight; 0 if none */
    uint32_t oldest_link;       /* its link; PAGERT_LINK_COUNT if none */
    uint64_t oldest_bytes;      /* its size */
    pagert_transfer last_failed; /* the last transfer that failed; page_count 0 if none did */
    int32_t last_failed_result;
    uint64_t last_failed_offset; /* in the flash file, where it was a flash transfer */
} pagert_pump_state;
void pagert_pump_get_state(pagert_pump *pump, pagert_pump_state *state);
void pagert_pump_reset_counters(pagert_pump *pump);
int pagert_pump_check(pagert_pump *pump); /* pagert_check() under the lock */

#ifdef __cplusplus
}
#endif
#endif
