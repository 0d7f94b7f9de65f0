/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of libpump share.
 */
#ifndef PAGERT_PUMP_INTERNAL_H
#define PAGERT_PUMP_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "pagert/pump.h"

/* A transfer on its way through an engine. */
typedef struct ticket {
    pagert_request request;
    pagert_transfer transfer;
    uint64_t start_ns;
    uint32_t lane;
    struct ticket *next; /* free, or waiting to be submitted */
    struct ticket *older, *younger; /* in flight */
} ticket;

enum { LOOK_AHEAD_BACKLOG = 64 }; /* pages that may wait for their fetch to start */

enum { LANE_MEMORY, LANE_FLASH, LANE_COUNT };

/* Bytes in flight are counted by where they go: away from the device, or to it and within it. */
enum { INWARDS, OUTWARDS, DIRECTIONS };
#define OUTWARD_LINKS (1u << PAGERT_DEVICE_TO_HOST | 1u << PAGERT_DEVICE_TO_FLASH | 1u << PAGERT_HOST_TO_FLASH)
static inline uint32_t direction_of(uint32_t link) { return OUTWARD_LINKS >> link & 1 ? OUTWARDS : INWARDS; }

/* One engine, the tickets that limit what it gets, and those it refused for now. */
typedef struct lane {
    pagert_engine engine;
    uint32_t link_mask;
    uint64_t bytes[DIRECTIONS], bytes_max[DIRECTIONS]; /* in flight; no more are taken from `bytes_max` on */
    ticket *free;
    ticket *unsent, **unsent_end; /* the driver's */
    bool refused;                 /* the driver's: the engine took or gave nothing; ask again soon */
} lane;

/* Whoever drives takes transfers from the core, gives them to the engines and takes them back. It is one
 * thread at a time: a caller that has to wait anyway, so that its fault costs no change of threads, or
 * the pump's own thread while no caller waits. `driver` is an address that stands for it. */
struct pagert_pump {
    pthread_mutex_t lock;   /* of the core, and of every field below that is not the driver's */
    pthread_cond_t changed; /* callers wait for it: a transfer completed, or a pin was let go of */
    pthread_cond_t work;    /* the thread waits for it: something to do, and nobody who does it */
    pagert_core *core;
    pagert_config config;
    void *core_memory;
    uint64_t core_memory_bytes;
    unsigned char *device_arena, *host_arena;
    lane lanes[LANE_COUNT];
    ticket *tickets;
    ticket *oldest, *youngest; /* in flight, by start */
    int wake_fd;
    const void *driver;       /* NULL: nobody; the pump itself: its thread; else a caller */
    uint32_t waiters;         /* callers that wait, also the one that drives */
    uint32_t leaving;         /* of those, who wait for pages to leave: what is fetched ahead would undo it */
    bool asleep;              /* the driver is in poll(); `wake_fd` ends that */
    bool thread_polls;        /* the thread is in poll(), and perhaps no longer the driver */
    bool kicked;              /* there may be transfers to take */
    bool stopping, ending;    /* take no transfers any more; end the thread */
    pthread_t thread;
    uint64_t stall_ns;
    _Atomic uint64_t changes; /* counts what `changed` tells */
    uint64_t ended_pages;     /* of transfers that came back, failed or not */
    uint64_t failures;        /* transfers that failed */
    pagert_transfer failed;   /* the last that failed, with its result; page_count 0: none did */
    int32_t failed_result;
    uint64_t failed_offset;
    _Atomic(pagert_release_node *) released; /* pushed by finalizers, without a lock */
    pagert_release_node *held_back;          /* released while held: tried again at the next unpin */
};

/* All with the lock held. */
uint64_t pump_now_ns(void);
void pump_kick(pagert_pump *pump);
void pump_tell_waiters(pagert_pump *pump);
void pump_drain_released(pagert_pump *pump);

/* Let the policy do ahead of time what it expects to be needed. How many pages were started. */
uint32_t pump_look_ahead(pagert_pump *pump);

/* Drive, or wait for the driver. `me` is the caller's, the same in each call. False: the time is over. */
bool pump_step(pagert_pump *pump, const void *me, uint64_t deadline_ns);
void pump_leave(pagert_pump *pump, const void *me); /* after the last step */
void *pump_run(void *context);

#endif
