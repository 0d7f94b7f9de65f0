/* SPDX-License-Identifier: Apache-2.0
 *
 * The host engine under random fills and copies: every byte, the bytes around every target, every
 * request back exactly once, a full queue, and closing with work in flight.
 *
 * usage: copy_stress [seed [rounds]]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pagert/copy.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: seed %" PRIu64 ": %s\n", __FILE__, __LINE__, run_seed,         \
                    #condition);                                                                   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

enum {
    ITEM_COUNT = 1200,
    SMALL_BYTES = 6000,
    LARGE_BYTES = 3 << 20,
    CANARY_BYTES = 64,
    LARGE_EVERY = 100
};

typedef struct driven {
    pagert_request request;
    uint8_t *target, *source;
    uint64_t room_bytes;
    int state; /* 0: not taken, 1: in flight, 2: back */
} driven;

static uint64_t run_seed, random_state;
static driven items[ITEM_COUNT];

static uint64_t draw(uint64_t below)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return ((random_state * 2685821657736338717u) >> 16) % below;
}

static void make_request(driven *item)
{
    const int kind = draw(3) ? PAGERT_REQUEST_COPY : PAGERT_REQUEST_FILL;
    uint64_t size_bytes = draw(8) ? 1 + draw(item->room_bytes) : draw(3);
    for (uint64_t at = 0; at < size_bytes; at += 8) {
        const uint64_t word = draw(UINT64_MAX);
        memcpy(item->source + at, &word, size_bytes - at < 8 ? size_bytes - at : 8);
    }
    memset(item->target - CANARY_BYTES, 0xa5, size_bytes + 2 * CANARY_BYTES);
    item->request = (pagert_request){.kind = (uint32_t)kind,
                                     .result = 1,
                                     .target = item->target,
                                     .source = kind == PAGERT_REQUEST_COPY ? item->source : NULL,
                                     .size_bytes = size_bytes,
                                     .tag = item};
    item->state = 0;
}

static void check_finished(driven *item)
{
    const pagert_request *request = &item->request;
    CHECK(item->state == 1 && request->result == 0);
    item->state = 2;
    for (uint64_t i = 0; i < CANARY_BYTES; i++)
        CHECK(item->target[-1 - (int64_t)i] == 0xa5 &&
              item->target[request->size_bytes + i] == 0xa5);
    if (request->kind == PAGERT_REQUEST_COPY)
        CHECK(memcmp(item->target, item->source, request->size_bytes) == 0);
    else
        for (uint64_t i = 0; i < request->size_bytes; i++)
            CHECK(item->target[i] == 0);
}

static uint32_t wait_and_reap(pagert_engine engine)
{
    struct pollfd descriptor = {.fd = engine.event_fd, .events = POLLIN};
    CHECK(poll(&descriptor, 1, 60000) == 1);
    pagert_request *finished[16];
    const int count = engine.reap(engine.context, finished, 1 + (int)draw(16));
    CHECK(count >= 0);
    for (int i = 0; i < count; i++)
        check_finished(finished[i]->tag);
    return (uint32_t)count;
}

static void run(uint32_t thread_count)
{
    pagert_copy *copy;
    CHECK(pagert_copy_open(thread_count, &copy) == 0);
    const pagert_engine engine = pagert_copy_engine(copy);
    for (int i = 0; i < ITEM_COUNT; i++)
        make_request(&items[i]);
    uint32_t finished = 0;
    for (int i = 0; i < ITEM_COUNT;) {
        items[i].state = 1;
        const int code = engine.submit(engine.context, &items[i].request);
        CHECK(code == 0 || code == -EAGAIN);
        i += code == 0;
        if (code == -EAGAIN || draw(1200) == 0) {
            if (code == -EAGAIN)
                items[i].state = 0;
            finished += wait_and_reap(engine);
        }
    }
    CHECK(engine.flush(engine.context) == 0);
    while (finished < ITEM_COUNT)
        finished += wait_and_reap(engine);

    pagert_request odd = {.kind = PAGERT_REQUEST_READ, .result = 1, .size_bytes = 1}, *back;
    CHECK(engine.submit(engine.context, &odd) == 0);
    CHECK(engine.reap(engine.context, &back, 1) == 1 && back == &odd && odd.result == -EINVAL);
    CHECK(engine.reap(engine.context, &back, 1) == 0);

    for (int i = 0; i < 50; i++) { /* what is in flight is done before the threads end */
        make_request(&items[i]);
        CHECK(engine.submit(engine.context, &items[i].request) == 0);
    }
    pagert_copy_close(copy);
    for (int i = 0; i < 50; i++) {
        items[i].state = 1;
        items[i].request.result = 0;
        check_finished(&items[i]);
    }
}

int main(int count, char **arguments)
{
    const uint64_t seed = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    const uint64_t rounds = count > 2 ? strtoull(arguments[2], NULL, 10) : 3;
    for (int i = 0; i < ITEM_COUNT; i++) {
        driven *item = &items[i];
        item->room_bytes = i % LARGE_EVERY ? SMALL_BYTES : LARGE_BYTES;
        uint8_t *memory = malloc(2 * item->room_bytes + 3 * CANARY_BYTES);
        if (!memory)
            return 1;
        item->target = memory + CANARY_BYTES;
        item->source = item->target + item->room_bytes + CANARY_BYTES;
    }
    for (uint64_t round = 0; round < rounds; round++) {
        run_seed = seed + round;
        random_state = run_seed * 0x9e3779b97f4a7c15u + 1;
        run(1 + (uint32_t)draw(4));
    }
    for (int i = 0; i < ITEM_COUNT; i++)
        free(items[i].target - CANARY_BYTES);
    printf("copy_stress: seeds %" PRIu64 " to %" PRIu64 " passed\n", seed, seed + rounds - 1);
    return 0;
}
