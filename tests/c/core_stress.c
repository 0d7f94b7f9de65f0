/* SPDX-License-Identifier: Apache-2.0
 *
 * Drives libcore through its header with a seeded random sequence of everything a caller may do, plays the
 * part of the engines, and verifies the whole state after each step.
 *
 * A frame is one 64-bit number here: it stands for the page's bytes. The driver keeps what every page must
 * hold (`expected`), and the numbers in the frames move only as the core's transfers say: so a page that is
 * dropped, mixed up, overwritten too early or copied from a stale place is seen at the next pin. Targets
 * hold garbage while a transfer is in flight and after it failed; a source is read at the start or at the
 * end of the transfer, at random, since an engine may do either.
 *
 * usage: core_stress [seed [rounds [steps]]]
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "pagert/core.h"

enum {
    PAGE_BYTES = 4096,
    PAGE_COUNT = 512,
    FRAMES_MAX = 256,
    REGIONS_MAX = 24,
    PINS_MAX = 5,
    ACCESSES_MAX = 3,
    IN_FLIGHT_MAX = 16,
};

static const uint64_t garbage = 0xdeadbeefdeadbeef;
static const uint32_t all_links = (1u << PAGERT_LINK_COUNT) - 1;

typedef struct live_region {
    pagert_region region;
    uint32_t page_count;
    uint64_t size_bytes;
    uint32_t user_count; /* accesses of pins that were started */
} live_region;

typedef struct live_pin {
    pagert_pin pin;
    pagert_access accesses[ACCESSES_MAX];
    uint32_t regions[ACCESSES_MAX]; /* indices of the driver's */
    int started, ready;
} live_pin;

typedef struct flight {
    pagert_transfer transfer;
    uint64_t early[FRAMES_MAX]; /* source as it was at the start */
    int takes_early;
} flight;

/* The driver's state; one round at a time. */
typedef struct driver {
    pagert_core *core;
    void *memory;
    pagert_config config;
    uint64_t frames[PAGERT_TIER_COUNT][FRAMES_MAX];
    uint64_t expected[PAGE_COUNT];
    unsigned char undefined[PAGE_COUNT]; /* an overwrite was promised and never carried out */
    live_region regions[REGIONS_MAX];
    uint32_t region_count;
    live_pin pins[PINS_MAX];
    flight flights[IN_FLIGHT_MAX];
    uint32_t flight_count;
    uint32_t failure_percent;
    uint64_t random_state, next_value;
    uint64_t seed, step;
} driver;

static void fail(const driver *d, const char *what, int line)
{
    fprintf(stderr, "core_stress: line %d: %s (seed %" PRIu64 ", step %" PRIu64 ")\n", line, what, d->seed,
            d->step);
    abort();
}
#define REQUIRE(d, condition) ((condition) ? (void)0 : fail((d), #condition, __LINE__))

/* splitmix64 */
static uint64_t random_bits(driver *d)
{
    uint64_t z = (d->random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint32_t random_below(driver *d, uint32_t limit)
{
    return (uint32_t)(random_bits(d) % limit);
}

static int chance(driver *d, uint32_t percent)
{
    return random_below(d, 100) < percent;
}

static void verify_state(driver *d)
{
    int line = pagert_check(d->core);
    if (line != 0) {
        fprintf(stderr, "core_stress: pagert_check failed at its line %d\n", line);
        fail(d, "the state is broken", __LINE__);
    }
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++) {
        pagert_usage usage;
        pagert_get_usage(d->core, tier, &usage);
        REQUIRE(d, usage.capacity_frames == d->config.frame_count[tier]);
        REQUIRE(d, usage.used_frames <= usage.peak_frames);
        REQUIRE(d, usage.peak_frames <= usage.capacity_frames);
    }
    REQUIRE(d, pagert_in_flight(d->core) == d->flight_count);
}

/* Tiers of a link's two ends; -1 where there is none. */
static void link_ends(const driver *d, uint32_t link, int *source, int *target)
{
    static const int ends[PAGERT_LINK_COUNT][2] = {
        [PAGERT_FILL] = {-1, PAGERT_DEVICE},
        [PAGERT_MOVE] = {PAGERT_DEVICE, PAGERT_DEVICE},
        [PAGERT_HOST_TO_DEVICE] = {PAGERT_HOST, PAGERT_DEVICE},
        [PAGERT_FLASH_TO_DEVICE] = {PAGERT_FLASH, PAGERT_DEVICE},
        [PAGERT_FLASH_TO_HOST] = {PAGERT_FLASH, PAGERT_HOST},
        [PAGERT_DEVICE_TO_HOST] = {PAGERT_DEVICE, PAGERT_HOST},
        [PAGERT_DEVICE_TO_FLASH] = {PAGERT_DEVICE, PAGERT_FLASH},
        [PAGERT_HOST_TO_FLASH] = {PAGERT_HOST, PAGERT_FLASH},
    };
    REQUIRE(d, link < PAGERT_LINK_COUNT);
    *source = ends[link][0];
    *target = ends[link][1];
}

/* Take one transfer from the core. 1 if there was one. */
static int start_transfer(driver *d, uint32_t link_mask)
{
    if (d->flight_count == IN_FLIGHT_MAX)
        return 0;
    flight *f = &d->flights[d->flight_count];
    int more = pagert_next_transfer(d->core, link_mask, &f->transfer);
    REQUIRE(d, more == 0 || more == 1);
    if (more == 0)
        return 0;
    d->flight_count++;

    const pagert_transfer *t = &f->transfer;
    int source, target;
    link_ends(d, t->link, &source, &target);
    REQUIRE(d, link_mask >> t->link & 1);
    REQUIRE(d, t->page_count >= 1 && t->page_count <= d->config.transfer_pages_max);
    REQUIRE(d, t->first_page + t->page_count <= PAGE_COUNT);
    REQUIRE(d, t->target_frame + t->page_count <= d->config.frame_count[target]);
    /* Neighbouring tiers only: with a host tier, nothing passes it by. */
    if (d->config.frame_count[PAGERT_HOST] > 0)
        REQUIRE(d, t->link != PAGERT_FLASH_TO_DEVICE && t->link != PAGERT_DEVICE_TO_FLASH);
    if (source >= 0) {
        REQUIRE(d, t->source_frame + t->page_count <= d->config.frame_count[source]);
        memcpy(f->early, &d->frames[source][t->source_frame], t->page_count * sizeof(uint64_t));
    } else {
        REQUIRE(d, t->source_frame == PAGERT_NONE);
        memset(f->early, 0, t->page_count * sizeof(uint64_t));
    }
    f->takes_early = source < 0 || chance(d, 50);
    for (uint32_t i = 0; i < t->page_count; i++)
        d->frames[target][t->target_frame + i] = garbage;
    return 1;
}

static void finish_transfer(driver *d, uint32_t index, uint32_t failure_percent)
{
    flight f = d->flights[index];
    d->flights[index] = d->flights[--d->flight_count];
    int source, target;
    link_ends(d, f.transfer.link, &source, &target);
    int32_t result = chance(d, failure_percent) ? -5 : 0;
    if (result == 0) {
        const uint64_t *late = source < 0 ? f.early : &d->frames[source][f.transfer.source_frame];
        memmove(&d->frames[target][f.transfer.target_frame], f.takes_early ? f.early : late,
                f.transfer.page_count * sizeof(uint64_t));
    }
    REQUIRE(d, pagert_complete(d->core, &f.transfer, result) == 0);
}

/* Carry transfers out until nothing is left to do. */
static void drain(driver *d, uint32_t failure_percent)
{
    for (;;) {
        while (start_transfer(d, all_links)) {
        }
        if (d->flight_count == 0)
            return;
        finish_transfer(d, random_below(d, d->flight_count), failure_percent);
    }
}

static void reserve(driver *d)
{
    if (d->region_count == REGIONS_MAX)
        return;
    live_region *r = &d->regions[d->region_count];
    memset(r, 0, sizeof *r);
    uint32_t pages = 1 + random_below(d, chance(d, 10) ? 100 : 12);
    r->size_bytes = (uint64_t)pages * PAGE_BYTES - random_below(d, PAGE_BYTES);
    r->page_count = pages;
    int code = pagert_reserve(d->core, r->size_bytes, &r->region);
    if (code == PAGERT_E_PAGES)
        return;
    REQUIRE(d, code == 0);
    REQUIRE(d, r->region.first_page + pages <= PAGE_COUNT);
    memset(&d->expected[r->region.first_page], 0, pages * sizeof(uint64_t));
    memset(&d->undefined[r->region.first_page], 0, pages);
    d->region_count++;
}

static void write_page(driver *d, uint32_t page, uint32_t frame)
{
    uint64_t value = d->next_value++;
    d->frames[PAGERT_DEVICE][frame] = value;
    d->expected[page] = value;
    d->undefined[page] = 0;
}

static int covers_page(const live_region *r, const pagert_access *a, uint32_t page)
{
    uint64_t start = (uint64_t)(page - r->region.first_page) * PAGE_BYTES;
    uint64_t end = start + PAGE_BYTES < r->size_bytes ? start + PAGE_BYTES : r->size_bytes;
    return a->mode == PAGERT_OVERWRITE && a->offset_bytes <= start && a->offset_bytes + a->size_bytes >= end;
}

/* Verify what a ready pin sees; write where it may. `first`: the pin has just become ready. */
static void use_pin(driver *d, const live_pin *p, int first)
{
    for (uint32_t i = 0; i < p->pin.access_count; i++) {
        const pagert_access *a = &p->accesses[i];
        const live_region *r = &d->regions[p->regions[i]];
        REQUIRE(d, a->first_page == r->region.first_page + a->offset_bytes / PAGE_BYTES);
        REQUIRE(d, a->device_bytes % PAGE_BYTES == a->offset_bytes % PAGE_BYTES);
        for (uint32_t k = 0; k < a->page_count; k++) {
            uint32_t page = a->first_page + k;
            uint32_t frame = (uint32_t)(a->device_bytes / PAGE_BYTES) + k;
            pagert_page_info info;
            REQUIRE(d, pagert_page(d->core, page, &info) == 0);
            REQUIRE(d, info.frame[PAGERT_DEVICE] == frame);
            REQUIRE(d, info.holds > 0);
            int overwritten = first && covers_page(r, a, page);
            if (!overwritten && !d->undefined[page])
                REQUIRE(d, d->frames[PAGERT_DEVICE][frame] == d->expected[page]);
            if (a->mode != PAGERT_READ)
                write_page(d, page, frame);
        }
    }
}

/* Between the start of an overwrite and its writing, the covered pages hold anything. */
static void mark_undefined(driver *d, const live_pin *p)
{
    for (uint32_t i = 0; i < p->pin.access_count; i++) {
        const pagert_access *a = &p->accesses[i];
        for (uint32_t page = a->first_page; page < a->first_page + a->page_count; page++)
            if (covers_page(&d->regions[p->regions[i]], a, page))
                d->undefined[page] = 1;
    }
}

static void unpin(driver *d, live_pin *p)
{
    if (p->ready)
        use_pin(d, p, 0);
    else
        mark_undefined(d, p);
    for (uint32_t i = 0; i < p->pin.access_count; i++)
        d->regions[p->regions[i]].user_count--;
    REQUIRE(d, pagert_unpin(d->core, &p->pin) == 0);
    REQUIRE(d, pagert_unpin(d->core, &p->pin) == PAGERT_E_STATE);
    p->started = p->ready = 0;
}

static uint32_t started_pins(const driver *d)
{
    uint32_t count = 0;
    for (uint32_t p = 0; p < PINS_MAX; p++)
        count += d->pins[p].started != 0;
    return count;
}

static int uses_region(const live_pin *p, uint32_t index)
{
    for (uint32_t i = 0; p->started && i < p->pin.access_count; i++)
        if (p->regions[i] == index)
            return 1;
    return 0;
}

static void release(driver *d)
{
    if (d->region_count == 0)
        return;
    uint32_t index = random_below(d, d->region_count), last = d->region_count - 1;
    live_region r = d->regions[index];
    int code = pagert_release(d->core, r.region);
    if (code == PAGERT_E_STATE) {
        REQUIRE(d, r.user_count > 0);
        return;
    }
    REQUIRE(d, code == 0);
    REQUIRE(d, pagert_release(d->core, r.region) == PAGERT_E_STALE);
    for (uint32_t p = 0; p < PINS_MAX; p++) {
        /* Only a pin that still waits for its place holds nothing; it learns that the region is gone. */
        if (uses_region(&d->pins[p], index)) {
            REQUIRE(d, !d->pins[p].ready);
            REQUIRE(d, pagert_pin_poll(d->core, &d->pins[p].pin) == PAGERT_E_STALE);
            unpin(d, &d->pins[p]);
        }
    }
    /* Pins know regions by index: the last one moves into the gap. */
    d->regions[index] = d->regions[last];
    d->region_count--;
    for (uint32_t p = 0; p < PINS_MAX; p++)
        for (uint32_t i = 0; d->pins[p].started && i < d->pins[p].pin.access_count; i++)
            if (d->pins[p].regions[i] == last)
                d->pins[p].regions[i] = index;
}

/* Whether a pin may find no frames: fragmentation alone is no reason. */
static int must_fail(const driver *d, const live_pin *p)
{
    const pagert_access *a = &p->accesses[0];
    uint64_t end = a->offset_bytes + a->size_bytes;
    uint64_t pages = (end - 1) / PAGE_BYTES - a->offset_bytes / PAGE_BYTES + 1;
    int others = started_pins(d) > (p->started ? 1u : 0u);
    return others || p->pin.access_count > 1 || pages > d->config.frame_count[PAGERT_DEVICE];
}

static void poll_pin(driver *d, live_pin *p)
{
    if (!p->started || p->ready)
        return;
    int code = pagert_pin_poll(d->core, &p->pin);
    if (code == 1) {
        p->ready = 1;
        use_pin(d, p, 1);
    } else if (code < 0) {
        REQUIRE(d, code == PAGERT_E_TRANSFER || code == PAGERT_E_FULL || code == PAGERT_E_FRAMES);
        REQUIRE(d, code != PAGERT_E_TRANSFER || d->failure_percent > 0);
        REQUIRE(d, code != PAGERT_E_FRAMES || must_fail(d, p));
        unpin(d, p);
    } else {
        REQUIRE(d, code == 0);
    }
}

static void random_range(driver *d, const live_region *r, uint64_t *offset_bytes, uint64_t *size_bytes)
{
    if (chance(d, 40)) {
        *offset_bytes = 0;
        *size_bytes = r->size_bytes;
        return;
    }
    *offset_bytes = random_bits(d) % r->size_bytes;
    *size_bytes = 1 + random_bits(d) % (r->size_bytes - *offset_bytes);
}

static void pin(driver *d)
{
    live_pin *p = &d->pins[random_below(d, PINS_MAX)];
    if (p->started || d->region_count == 0)
        return;
    memset(p, 0, sizeof *p);
    p->pin.accesses = p->accesses;
    p->pin.access_count = 1 + random_below(d, ACCESSES_MAX);
    for (uint32_t i = 0; i < p->pin.access_count; i++) {
        p->regions[i] = random_below(d, d->region_count);
        const live_region *r = &d->regions[p->regions[i]];
        pagert_access *a = &p->accesses[i];
        a->region = r->region;
        a->mode = random_below(d, 3);
        /* A caller would merge accesses to one region: what one of them overwrites, none may want to read. */
        for (uint32_t j = 0; j < i; j++)
            if (p->regions[j] == p->regions[i])
                a->mode = p->accesses[j].mode = PAGERT_UPDATE;
        random_range(d, r, &a->offset_bytes, &a->size_bytes);
    }
    int code = pagert_pin_start(d->core, &p->pin);
    if (code < 0) {
        REQUIRE(d, code == PAGERT_E_FRAMES || code == PAGERT_E_FULL);
        REQUIRE(d, code != PAGERT_E_FRAMES || must_fail(d, p));
        REQUIRE(d, pagert_unpin(d->core, &p->pin) == PAGERT_E_STATE);
        return;
    }
    REQUIRE(d, code <= 1);
    for (uint32_t i = 0; i < p->pin.access_count; i++)
        d->regions[p->regions[i]].user_count++;
    p->started = 1;
    p->ready = code;
    if (code == 1)
        use_pin(d, p, 1);
    else
        mark_undefined(d, p);
}

static void range_call(driver *d)
{
    if (d->region_count == 0)
        return;
    const live_region *r = &d->regions[random_below(d, d->region_count)];
    uint64_t offset_bytes, size_bytes;
    random_range(d, r, &offset_bytes, &size_bytes);
    uint32_t first = r->region.first_page + (uint32_t)(offset_bytes / PAGE_BYTES);
    uint32_t last = r->region.first_page + (uint32_t)((offset_bytes + size_bytes - 1) / PAGE_BYTES);
    pagert_residency residency;
    REQUIRE(d, pagert_locate(d->core, r->region, offset_bytes, size_bytes, &residency) == 0);
    uint64_t sum = residency.zero;
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++)
        sum += residency.pages[tier];
    REQUIRE(d, sum == last - first + 1);
    pagert_failure failure;
    uint32_t call = random_below(d, 10);
    if (call < 4) {
        int64_t left = pagert_evict(d->core, r->region, offset_bytes, size_bytes, &failure);
        REQUIRE(d, left >= 0 || left == PAGERT_E_STATE || left == PAGERT_E_FULL || left == PAGERT_E_TRANSFER);
        REQUIRE(d, left != PAGERT_E_STATE || r->user_count > 0);
        REQUIRE(d, left != PAGERT_E_TRANSFER || d->failure_percent > 0);
        REQUIRE(d, left <= (int64_t)(last - first + 1));
    } else if (call < 8) {
        int code = pagert_prefetch(d->core, r->region, offset_bytes, size_bytes);
        REQUIRE(d, code == 0 || code == 1 || code == PAGERT_E_FRAMES || code == PAGERT_E_FULL);
        (void)pagert_look_ahead(d->core, call); /* nothing with lru */
    } else if (call == 8) {
        int64_t left = pagert_flush(d->core, &failure);
        REQUIRE(d, left >= 0 || left == PAGERT_E_FULL || left == PAGERT_E_TRANSFER);
        REQUIRE(d, left != PAGERT_E_TRANSFER || d->failure_percent > 0);
    }
}

static void stale_calls(driver *d)
{
    pagert_region never = {.first_page = random_below(d, PAGE_COUNT), .generation = 0xfffffff0u};
    pagert_residency residency;
    REQUIRE(d, pagert_release(d->core, never) == PAGERT_E_STALE);
    REQUIRE(d, pagert_locate(d->core, never, 0, 1, &residency) == PAGERT_E_STALE);
    if (d->region_count == 0)
        return;
    const live_region *r = &d->regions[random_below(d, d->region_count)];
    uint64_t beyond = (uint64_t)r->page_count * PAGE_BYTES;
    REQUIRE(d, pagert_locate(d->core, r->region, beyond, 1, &residency) == PAGERT_E_ARGUMENT);
    REQUIRE(d, pagert_locate(d->core, r->region, 1, UINT64_MAX, &residency) == PAGERT_E_ARGUMENT);
}

static void random_step(driver *d)
{
    uint32_t choice = random_below(d, 100);
    if (choice < 8) {
        reserve(d);
    } else if (choice < 13) {
        release(d);
    } else if (choice < 38) {
        pin(d);
    } else if (choice < 52) {
        live_pin *p = &d->pins[random_below(d, PINS_MAX)];
        if (p->started && (p->ready || chance(d, 20)))
            unpin(d, p);
    } else if (choice < 60) {
        range_call(d);
    } else if (choice < 62) {
        stale_calls(d);
    } else if (choice < 80) {
        start_transfer(d, chance(d, 70) ? all_links : (uint32_t)random_bits(d) & all_links);
    } else if (d->flight_count > 0) {
        finish_transfer(d, random_below(d, d->flight_count), d->failure_percent);
    }
    for (uint32_t p = 0; p < PINS_MAX; p++)
        poll_pin(d, &d->pins[p]);
    verify_state(d);
}

/* Once nothing is in flight and nothing can start, no pin may be waiting any more, except for another one
 * that was polled just now. */
static void require_progress(driver *d)
{
    uint32_t idle = 0;
    for (uint32_t attempt = 0; attempt < 1000; attempt++) {
        drain(d, d->failure_percent);
        uint32_t pending = 0, ended = 0;
        for (uint32_t p = 0; p < PINS_MAX; p++) {
            int waited = d->pins[p].started && !d->pins[p].ready;
            poll_pin(d, &d->pins[p]);
            int waits = d->pins[p].started && !d->pins[p].ready;
            pending += waits;
            ended += waited && !waits;
        }
        if (pending == 0)
            return;
        idle = start_transfer(d, all_links) || ended > 0 ? 0 : idle + 1;
        if (idle > 1)
            break;
    }
    fail(d, "a pin waits and nothing is in flight", __LINE__);
}

static void finish_round(driver *d)
{
    if (d->failure_percent > 0 && chance(d, 50)) /* nothing works any more: everybody is told so */
        d->failure_percent = 100;
    require_progress(d);
    for (uint32_t p = 0; p < PINS_MAX; p++)
        if (d->pins[p].started)
            unpin(d, &d->pins[p]);
    REQUIRE(d, pagert_held_frames(d->core) == 0);
    drain(d, 0);
    while (d->region_count > 0)
        release(d);
    drain(d, 0);
    verify_state(d);
    REQUIRE(d, pagert_reserved_pages(d->core) == 0);
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++) {
        pagert_usage usage;
        pagert_get_usage(d->core, tier, &usage);
        REQUIRE(d, usage.used_frames == 0);
    }
}

static void run_round(driver *d, uint64_t seed, uint64_t steps)
{
    memset(d, 0, sizeof *d);
    d->seed = d->random_state = seed;
    d->next_value = 1;
    d->failure_percent = chance(d, 30) ? 10 : 0;
    uint32_t tiers = random_below(d, 3);
    d->config = (pagert_config){
        .page_bytes = PAGE_BYTES,
        .page_count = PAGE_COUNT,
        .frame_count = {4 + random_below(d, chance(d, 25) ? FRAMES_MAX - 4 : 40), tiers == 0 ? 0 : 2 + random_below(d, 60),
                        tiers == 1 ? 0 : 2 + random_below(d, 200)},
        .transfer_pages_max = 1 + random_below(d, 16),
        .policy = seed % 5 == 4 ? pagert_policy_named("lookahead") : pagert_policy_named("lru"),
    };
    uint64_t memory_bytes = (pagert_memory_bytes(&d->config) + 63) / 64 * 64;
    REQUIRE(d, memory_bytes > 0);
    d->memory = aligned_alloc(64, memory_bytes);
    REQUIRE(d, d->memory != NULL);
    memset(d->memory, 0, memory_bytes);
    REQUIRE(d, pagert_init(&d->config, d->memory, memory_bytes, &d->core) == 0);
    /* Every other one with lookahead takes nearly the same steps over and over, as training does. */
    uint64_t period = seed % 10 == 9 ? 20 + random_below(d, 100) : 0, begin = d->random_state;
    for (d->step = 0; d->step < steps; d->step++) {
        if (period > 0 && d->step % period == 0 && !chance(d, 5))
            d->random_state = begin;
        random_step(d);
        if (d->step % 64 == 63)
            require_progress(d);
    }
    finish_round(d);
    free(d->memory);
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    uint64_t rounds = argc > 2 ? strtoull(argv[2], NULL, 0) : 200;
    uint64_t steps = argc > 3 ? strtoull(argv[3], NULL, 0) : 1000;
    static driver d;

    printf("core_stress: seeds %" PRIu64 " to %" PRIu64 ", %" PRIu64 " steps each\n", seed,
           seed + rounds - 1, steps);
    fflush(stdout);
    for (uint64_t round = 0; round < rounds; round++)
        run_round(&d, seed + round, steps);
    return 0;
}
