/* SPDX-License-Identifier: Apache-2.0
 *
 * thread: driving. Take what the core lets start, hand it to the engines, take back what they have
 * finished, tell the core; sleep only when none of these found anything to do.
 *
 * The one who drives releases the lock for the engines and for its sleep. Only from the thread, and only
 * while it sleeps, may a caller take over: then nobody is inside an engine. The thread finds out when it
 * wakes up. A driver that leaves work behind wakes the thread.
 */
#include "internal.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <time.h>

#include "../worker.h"

enum { REAP_MAX = 64, REFUSED_NS = 1000000 };

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

/* The links of a lane on which one more transfer may start. */
static uint32_t open_links(const lane *l)
{
    uint32_t links = l->link_mask;
    if (l->bytes[INWARDS] >= l->bytes_max[INWARDS])
        links &= OUTWARD_LINKS;
    if (l->bytes[OUTWARDS] >= l->bytes_max[OUTWARDS])
        links &= ~OUTWARD_LINKS;
    return links;
}

/* With the lock held: tickets for what may start now. */
static void take_transfers(pagert_pump *pump)
{
    pump->kicked = false;
    for (uint32_t index = 0; index < LANE_COUNT; index++) {
        lane *l = &pump->lanes[index];
        while (l->free != NULL) {
            ticket *t = l->free;
            if (!pagert_next_transfer(pump->core, open_links(l), &t->transfer))
                break;
            l->free = t->next;
            describe(pump, &t->transfer, &t->request);
            t->request.tag = t;
            l->bytes[direction_of(t->transfer.link)] += t->request.size_bytes;
            t->start_ns = pump_now_ns();
            t->next = NULL;
            *l->unsent_end = t;
            l->unsent_end = &t->next;
            t->older = pump->youngest;
            t->younger = NULL;
            *(pump->youngest != NULL ? &pump->youngest->younger : &pump->oldest) = t;
            pump->youngest = t;
        }
    }
}

/* With the lock held: the ticket's transfer has ended. */
static void finish(pagert_pump *pump, ticket *t)
{
    int32_t result = t->request.result;
    pump->ended_pages += t->transfer.page_count;
    if (result < 0) {
        pump->failures++;
        pump->failed = t->transfer;
        pump->failed_result = result;
        pump->failed_offset = t->request.failed_offset;
    }
    pagert_complete(pump->core, &t->transfer, result);
    *(t->older != NULL ? &t->older->younger : &pump->oldest) = t->younger;
    *(t->younger != NULL ? &t->younger->older : &pump->youngest) = t->older;
    lane *l = &pump->lanes[t->lane];
    l->bytes[direction_of(t->transfer.link)] -= t->request.size_bytes;
    t->next = l->free;
    l->free = t;
}

/* Without the lock. What an engine refuses for good ends here; what it refuses for now (-EAGAIN) stays first
 * in line. Every request that an engine gives back makes room for one more. */
static int send_and_reap(lane *l, ticket **ended)
{
    int count = 0;
    l->refused = false;
    while (l->unsent != NULL && count < REAP_MAX) {
        ticket *t = l->unsent;
        int code = l->engine.submit(l->engine.context, &t->request);
        if (code == -EAGAIN) {
            l->refused = true;
            break;
        }
        l->unsent = t->next;
        if (l->unsent == NULL)
            l->unsent_end = &l->unsent;
        if (code < 0) {
            t->request.result = code;
            ended[count++] = t;
        }
    }
    int flushed = l->engine.flush(l->engine.context);
    pagert_request *finished[REAP_MAX];
    int reaped = l->engine.reap(l->engine.context, finished, REAP_MAX - count);
    l->refused |= flushed < 0 || reaped < 0;
    for (int i = 0; i < reaped; i++)
        ended[count++] = finished[i]->tag;
    return count;
}

/* An engine that refused something may have no event to tell when it no longer would: then the sleep is
 * short. */
static uint64_t wake_time(const pagert_pump *pump, uint64_t deadline_ns)
{
    for (uint32_t index = 0; index < LANE_COUNT; index++) {
        uint64_t soon_ns = pump->lanes[index].refused ? pump_now_ns() + REFUSED_NS : deadline_ns;
        deadline_ns = soon_ns < deadline_ns ? soon_ns : deadline_ns;
    }
    return deadline_ns;
}

/* Without the lock, and no longer as the driver perhaps: until an engine or somebody who kicks has something. */
static void sleep_until_event(const pagert_pump *pump, uint64_t wake_ns)
{
    struct pollfd events[1 + LANE_COUNT];
    nfds_t count = 0;
    events[count++] = (struct pollfd){.fd = pump->wake_fd, .events = POLLIN};
    for (uint32_t index = 0; index < LANE_COUNT; index++)
        if (pump->lanes[index].engine.submit != NULL)
            events[count++] = (struct pollfd){.fd = pump->lanes[index].engine.event_fd, .events = POLLIN};
    uint64_t now_ns = pump_now_ns();
    uint64_t left_ns = wake_ns > now_ns ? wake_ns - now_ns : 0;
    struct timespec left = {.tv_sec = (time_t)(left_ns / 1000000000), .tv_nsec = (long)(left_ns % 1000000000)};
    (void)ppoll(events, count, &left, NULL);
}

/* With the lock held, which is released in between. True: something was done. */
static bool drive(pagert_pump *pump)
{
    ticket *ended[LANE_COUNT * REAP_MAX];
    int count = 0;
    pump_drain_released(pump);
    if (!pump->stopping) {
        (void)pump_look_ahead(pump);
        take_transfers(pump);
    }
    pthread_mutex_unlock(&pump->lock);
    for (uint32_t index = 0; index < LANE_COUNT; index++)
        if (pump->lanes[index].engine.submit != NULL)
            count += send_and_reap(&pump->lanes[index], ended + count);
    pthread_mutex_lock(&pump->lock);
    for (int i = 0; i < count; i++)
        finish(pump, ended[i]);
    if (count > 0)
        pump_tell_waiters(pump);
    return count > 0 || (pump->kicked && !pump->stopping);
}

static void sleep_as_driver(pagert_pump *pump, const void *me, uint64_t deadline_ns)
{
    bool is_thread = me == pump;
    pump->asleep = true;
    pump->thread_polls |= is_thread;
    uint64_t wake_ns = wake_time(pump, deadline_ns);
    pthread_mutex_unlock(&pump->lock);
    sleep_until_event(pump, wake_ns);
    pthread_mutex_lock(&pump->lock);
    if (is_thread)
        pump->thread_polls = false;
    if (pump->driver == me) {
        pump->asleep = false;
        pagert_event_drain(pump->wake_fd);
    }
}

static void wait_for_driver(pagert_pump *pump, uint64_t deadline_ns)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000),
                             .tv_nsec = (long)(deadline_ns % 1000000000)};
    (void)pthread_cond_timedwait(&pump->changed, &pump->lock, &until);
}

bool pump_step(pagert_pump *pump, const void *me, uint64_t deadline_ns)
{
    if (pump->driver == NULL || (pump->driver == pump && pump->asleep)) {
        pump->driver = me;
        pump->asleep = false;
    }
    uint64_t changes = pump->changes;
    pump->waiters += me != pump;
    if (pump->driver != me) {
        pump_kick(pump);
        wait_for_driver(pump, deadline_ns);
    } else if (!drive(pump))
        sleep_as_driver(pump, me, deadline_ns);
    pump->waiters -= me != pump;
    return pump->changes != changes || pump_now_ns() < deadline_ns;
}

static bool has_work(const pagert_pump *pump)
{
    return pump->oldest != NULL || (pump->kicked && !pump->stopping && !pagert_is_idle(pump->core));
}

void pump_leave(pagert_pump *pump, const void *me)
{
    if (pump->driver != me)
        return;
    pump->driver = NULL;
    if (!has_work(pump))
        return;
    pthread_cond_signal(&pump->work);
    if (pump->thread_polls)
        pagert_event_signal(pump->wake_fd);
}

/* There may be transfers to take. */
void pump_kick(pagert_pump *pump)
{
    pump->kicked = true;
    if (pump->driver == NULL)
        pump_leave(pump, NULL);
    else if (pump->asleep)
        pagert_event_signal(pump->wake_fd);
    pump->asleep = false;
}

void *pump_run(void *context)
{
    pagert_pump *pump = context;
    pthread_mutex_lock(&pump->lock);
    while (!pump->ending) {
        if (pump->driver == pump || (pump->driver == NULL && has_work(pump)))
            (void)pump_step(pump, pump, UINT64_MAX / 2);
        else
            pthread_cond_wait(&pump->work, &pump->lock);
        if (!has_work(pump))
            pump_leave(pump, pump);
    }
    pthread_mutex_unlock(&pump->lock);
    return NULL;
}
