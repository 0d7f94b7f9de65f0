/* SPDX-License-Identifier: Apache-2.0
 *
 * thread: the pump's own loop. Take what the core lets start, hand it to the engines, take back what they
 * have finished, tell the core; sleep only when none of these found anything to do.
 */
#include "internal.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>

#include "../worker.h"

enum { REAP_MAX = 64 };

static uint64_t bytes_of(const pagert_pump *pump, uint32_t pages) { return pages * pump->config.page_bytes; }

static unsigned char *address(const pagert_pump *pump, unsigned char *arena, uint32_t frame)
{
    return arena + bytes_of(pump, 1) * frame;
}

/* A transfer in the engine's words: addresses, offsets and sizes. */
static void describe(const pagert_pump *pump, const pagert_transfer *t, pagert_request *request)
{
    unsigned char *device = pump->device_arena, *host = pump->host_arena;
    *request = (pagert_request){.size_bytes = bytes_of(pump, t->page_count)};
    switch (t->link) {
    case PAGERT_FILL:
        request->kind = PAGERT_REQUEST_FILL;
        request->target = address(pump, device, t->target_frame);
        break;
    case PAGERT_MOVE:
        request->kind = PAGERT_REQUEST_COPY;
        request->source = address(pump, device, t->source_frame);
        request->target = address(pump, device, t->target_frame);
        break;
    case PAGERT_HOST_TO_DEVICE:
        request->kind = PAGERT_REQUEST_COPY;
        request->source = address(pump, host, t->source_frame);
        request->target = address(pump, device, t->target_frame);
        break;
    case PAGERT_DEVICE_TO_HOST:
        request->kind = PAGERT_REQUEST_COPY;
        request->source = address(pump, device, t->source_frame);
        request->target = address(pump, host, t->target_frame);
        break;
    case PAGERT_FLASH_TO_DEVICE:
    case PAGERT_FLASH_TO_HOST:
        request->kind = PAGERT_REQUEST_READ;
        request->target = address(pump, t->link == PAGERT_FLASH_TO_HOST ? host : device, t->target_frame);
        request->offset_bytes = bytes_of(pump, 1) * t->source_frame;
        break;
    default:
        request->kind = PAGERT_REQUEST_WRITE;
        request->source = address(pump, t->link == PAGERT_HOST_TO_FLASH ? host : device, t->source_frame);
        request->offset_bytes = bytes_of(pump, 1) * t->target_frame;
        break;
    }
}

/* With the lock held: tickets for what may start now. True if there were any. */
static bool take_transfers(pagert_pump *pump)
{
    bool taken = false;
    for (uint32_t index = 0; index < LANE_COUNT; index++) {
        lane *l = &pump->lanes[index];
        while (l->free != NULL) {
            ticket *t = l->free;
            if (!pagert_next_transfer(pump->core, l->link_mask, &t->transfer))
                break;
            l->free = t->next;
            l->busy++;
            describe(pump, &t->transfer, &t->request);
            t->request.tag = t;
            t->start_ns = pump_now_ns();
            t->next = NULL;
            *l->unsent_end = t;
            l->unsent_end = &t->next;
            t->older = pump->youngest;
            t->younger = NULL;
            *(pump->youngest != NULL ? &pump->youngest->younger : &pump->oldest) = t;
            pump->youngest = t;
            taken = true;
        }
    }
    return taken;
}

/* With the lock held: the ticket's transfer has ended. */
static void finish(pagert_pump *pump, ticket *t)
{
    int32_t result = t->request.result;
    if (result < 0) {
        pump->last_failure = (pagert_failure){t->transfer.first_page, t->transfer.link, result};
        pump->last_failed_offset = t->request.failed_offset;
    }
    pagert_complete(pump->core, &t->transfer, result);
    *(t->older != NULL ? &t->older->younger : &pump->oldest) = t->younger;
    *(t->younger != NULL ? &t->younger->older : &pump->youngest) = t->older;
    lane *l = &pump->lanes[t->lane];
    t->next = l->free;
    l->free = t;
    l->busy--;
}

/* Without the lock: only this thread touches `unsent` and calls engines. What an engine refuses for good
 * ends here; what it refuses for now (-EAGAIN) stays first in line. */
static int send_and_reap(lane *l, ticket **ended)
{
    int count = 0;
    while (l->unsent != NULL && count < REAP_MAX) {
        ticket *t = l->unsent;
        int code = l->engine.submit(l->engine.context, &t->request);
        if (code == -EAGAIN)
            break;
        l->unsent = t->next;
        if (l->unsent == NULL)
            l->unsent_end = &l->unsent;
        if (code < 0) {
            t->request.result = code;
            ended[count++] = t;
        }
    }
    l->engine.flush(l->engine.context);
    pagert_request *finished[REAP_MAX];
    int reaped = l->engine.reap(l->engine.context, finished, REAP_MAX - count);
    for (int i = 0; i < reaped; i++)
        ended[count++] = finished[i]->tag;
    return count;
}

static void sleep_until_event(const pagert_pump *pump)
{
    struct pollfd events[1 + LANE_COUNT];
    nfds_t count = 0;
    events[count++] = (struct pollfd){.fd = pump->wake_fd, .events = POLLIN};
    for (uint32_t index = 0; index < LANE_COUNT; index++)
        if (pump->lanes[index].engine.submit != NULL)
            events[count++] = (struct pollfd){.fd = pump->lanes[index].engine.event_fd, .events = POLLIN};
    (void)poll(events, count, -1);
    pagert_event_drain(pump->wake_fd);
}

void *pump_run(void *context)
{
    pagert_pump *pump = context;
    ticket *ended[LANE_COUNT * REAP_MAX];
    pthread_mutex_lock(&pump->lock);
    for (;;) {
        pump_drain_released(pump);
        if (!pump->stopping)
            pagert_look_ahead(pump->core, LOOK_AHEAD_BACKLOG);
        bool taken = !pump->stopping && take_transfers(pump);
        if (pump->stopping && pump->oldest == NULL)
            break;
        pthread_mutex_unlock(&pump->lock);

        int count = 0;
        for (uint32_t index = 0; index < LANE_COUNT; index++)
            if (pump->lanes[index].engine.submit != NULL)
                count += send_and_reap(&pump->lanes[index], ended + count);

        pthread_mutex_lock(&pump->lock);
        for (int i = 0; i < count; i++)
            finish(pump, ended[i]);
        if (count > 0) {
            pthread_cond_broadcast(&pump->changed);
        } else if (!taken && !(pump->stopping && pump->oldest == NULL)) {
            taken = !pump->stopping && take_transfers(pump); /* since the lock was free */
            if (!taken) {
                pump->asleep = true;
                pthread_mutex_unlock(&pump->lock);
                sleep_until_event(pump);
                pthread_mutex_lock(&pump->lock);
                pump->asleep = false;
            }
        }
    }
    pump->stopped = true;
    pthread_cond_broadcast(&pump->changed);
    pthread_mutex_unlock(&pump->lock);
    return NULL;
}
