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

/* One engine, the tickets that limit what it gets, and those it refused for now. */
typedef struct lane {
    pagert_engine engine;
    uint32_t link_mask;
    ticket *free;
    ticket *unsent, **unsent_end;
    uint32_t busy; /* tickets taken */
} lane;

struct pagert_pump {
    pthread_mutex_t lock;     /* of the core, and of every field below that is not the thread's own */
    pthread_cond_t changed;   /* a transfer completed, or a pin was let go */
    pagert_pager *core;
    pagert_config config;
    void *core_memory;
    uint64_t core_memory_bytes;
    unsigned char *device_arena, *host_arena;
    lane lanes[LANE_COUNT];
    ticket *tickets;
    ticket *oldest, *youngest; /* in flight, by start */
    int wake_fd;
    uint32_t waiters;         /* callers in a wait on `changed` */
    bool asleep;              /* the thread waits in poll() */
    bool stopping, stopped;
    pthread_t thread;
    uint64_t stall_ns;
    pagert_failure last_failure;
    uint64_t last_failed_offset;
    _Atomic(pagert_release_node *) released; /* pushed by finalizers, without a lock */
    pagert_release_node *held_back;          /* released while held: tried again at the next unpin */
};

uint64_t pump_now_ns(void);
void pump_drain_released(pagert_pump *pump);
void *pump_run(void *context);

#endif
