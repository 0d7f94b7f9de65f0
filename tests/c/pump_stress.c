/* SPDX-License-Identifier: Apache-2.0
 *
 * Drives libpump through its header from several threads at once, over engines made for the purpose: a
 * thread each, which carries requests out late, in another order, a few at a time or many, refuses some for
 * now (-EAGAIN) or for good, and lets some fail, whose targets then hold garbage.
 *
 * Each client has regions of its own and the bytes that they must hold. What a pin shows is compared, what it
 * may write is written. A transfer that failed must leave the bytes as they were; only an overwrite that was
 * promised and did not come about leaves them undefined.
 *
 * usage: pump_stress [seed [rounds [steps]]]
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "pagert/pump.h"

enum {
    PAGE_BYTES = 4096,
    PAGE_COUNT = 1024,
    DEVICE_FRAMES_MAX = 64,
    HOST_FRAMES_MAX = 512,
    FLASH_FRAMES_MAX = 640,
    CLIENTS_MAX = 4,
    REGIONS_MAX = 6,
    REGION_PAGES_MAX = 12,
    ACCESSES_MAX = 3,
    QUEUE_MAX = 32,
    WORD = sizeof(uint64_t),
    PAGE_WORDS = PAGE_BYTES / WORD,
};

static const uint64_t SECOND_NS = 1000000000;
static const uint64_t garbage = 0xdeadbeefdeadbeef;

static uint64_t seed_of_run;

static _Noreturn void fail(const char *what, int line)
{
    fprintf(stderr, "pump_stress: line %d: %s (seed %" PRIu64 ")\n", line, what, seed_of_run);
    abort();
}
#define REQUIRE(condition) ((condition) ? (void)0 : fail(#condition, __LINE__))

/* splitmix64 */
static uint64_t random_bits(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint32_t random_below(uint64_t *state, uint32_t limit)
{
    return (uint32_t)(random_bits(state) % limit);
}

static int chance(uint64_t *state, uint32_t percent) { return random_below(state, 100) < percent; }

static void sleep_ns(uint64_t ns)
{
    struct timespec time = {.tv_sec = (time_t)(ns / SECOND_NS), .tv_nsec = (long)(ns % SECOND_NS)};
    nanosleep(&time, NULL);
}

/* The engine. `inside` finds two callers at once, which the contract forbids. */
typedef struct engine {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t thread;
    int event_fd;
    unsigned char *file; /* what flash holds; NULL for the memory engine */
    pagert_request *taken[QUEUE_MAX], *finished[QUEUE_MAX];
    uint32_t taken_count, finished_count, capacity;
    uint64_t delay_ns;
    uint32_t failure_percent, refusal_percent;
    uint64_t random_state;
    int stop;
    atomic_int inside;
} engine;

static void spoil(pagert_request *r)
{
    uint64_t *target = r->target;
    for (uint64_t i = 0; i < r->size_bytes / WORD; i++)
        target[i] = garbage;
}

static void carry_out(engine *e, pagert_request *r, int fails)
{
    REQUIRE(r->size_bytes > 0 && r->size_bytes % PAGE_BYTES == 0);
    r->result = fails ? -EIO : 0;
    r->failed_offset = r->offset_bytes;
    if (e->file != NULL)
        REQUIRE(r->offset_bytes + r->size_bytes <= (uint64_t)FLASH_FRAMES_MAX * PAGE_BYTES);
    switch (r->kind) {
    case PAGERT_REQUEST_FILL:
        REQUIRE(e->file == NULL);
        fails ? spoil(r) : (void)memset(r->target, 0, r->size_bytes);
        break;
    case PAGERT_REQUEST_COPY:
        REQUIRE(e->file == NULL);
        fails ? spoil(r) : (void)memcpy(r->target, r->source, r->size_bytes);
        break;
    case PAGERT_REQUEST_READ:
        REQUIRE(e->file != NULL);
        fails ? spoil(r) : (void)memcpy(r->target, e->file + r->offset_bytes, r->size_bytes);
        break;
    default:
        REQUIRE(e->file != NULL && r->kind == PAGERT_REQUEST_WRITE);
        memcpy(e->file + r->offset_bytes, r->source, fails ? r->size_bytes / 2 : r->size_bytes);
        break;
    }
}

static void *run_engine(void *context)
{
    engine *e = context;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        while (!e->stop && e->taken_count == 0)
            pthread_cond_wait(&e->wake, &e->lock);
        if (e->taken_count == 0)
            break;
        uint64_t delay_ns = e->delay_ns > 0 ? random_bits(&e->random_state) % e->delay_ns : 0;
        uint32_t batch = 1 + random_below(&e->random_state, e->taken_count);
        pthread_mutex_unlock(&e->lock);
        sleep_ns(delay_ns);
        pthread_mutex_lock(&e->lock);
        for (; batch > 0; batch--) {
            uint32_t index = random_below(&e->random_state, e->taken_count);
            pagert_request *r = e->taken[index];
            e->taken[index] = e->taken[--e->taken_count];
            int fails = chance(&e->random_state, e->failure_percent);
            pthread_mutex_unlock(&e->lock);
            carry_out(e, r, fails);
            pthread_mutex_lock(&e->lock);
            e->finished[e->finished_count++] = r;
        }
        uint64_t one = 1;
        REQUIRE(write(e->event_fd, &one, sizeof one) == sizeof one);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

static void enter(engine *e) { REQUIRE(atomic_fetch_add(&e->inside, 1) == 0); }
static void leave(engine *e) { REQUIRE(atomic_fetch_sub(&e->inside, 1) == 1); }

static int submit(void *context, pagert_request *request)
{
    engine *e = context;
    enter(e);
    pthread_mutex_lock(&e->lock);
    int code = 0;
    if (e->taken_count + e->finished_count == e->capacity || chance(&e->random_state, e->refusal_percent))
        code = -EAGAIN;
    else if (chance(&e->random_state, e->failure_percent))
        code = -EIO;
    else
        e->taken[e->taken_count++] = request;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
    leave(e);
    return code;
}

static int flush(void *context)
{
    engine *e = context;
    enter(e);
    leave(e);
    return 0;
}

static int reap(void *context, pagert_request **finished, int max)
{
    engine *e = context;
    enter(e);
    pthread_mutex_lock(&e->lock);
    uint64_t count;
    REQUIRE(read(e->event_fd, &count, sizeof count) == sizeof count || errno == EAGAIN);
    int given = 0;
    while (given < max && e->finished_count > 0)
        finished[given++] = e->finished[--e->finished_count];
    uint64_t one = 1;
    if (e->finished_count > 0)
        REQUIRE(write(e->event_fd, &one, sizeof one) == sizeof one);
    pthread_mutex_unlock(&e->lock);
    leave(e);
    return given;
}

static pagert_engine open_engine(engine *e, uint64_t *random_state, int has_file)
{
    static const uint64_t delays_ns[] = {0, 20000, 500000};
    *e = (engine){.capacity = 1 + random_below(random_state, QUEUE_MAX)};
    e->random_state = random_bits(random_state);
    e->delay_ns = delays_ns[random_below(random_state, 3)];
    e->failure_percent = chance(random_state, 50) ? random_below(random_state, 20) : 0;
    e->refusal_percent = chance(random_state, 50) ? random_below(random_state, 50) : 0;
    e->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    REQUIRE(e->event_fd >= 0);
    if (has_file)
        REQUIRE((e->file = calloc(FLASH_FRAMES_MAX, PAGE_BYTES)) != NULL);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->wake, NULL);
    REQUIRE(pthread_create(&e->thread, NULL, run_engine, e) == 0);
    return (pagert_engine){e, e->event_fd, submit, flush, reap};
}

static void close_engine(engine *e)
{
    pthread_mutex_lock(&e->lock);
    REQUIRE(e->taken_count == 0 && e->finished_count == 0);
    e->stop = 1;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    pthread_cond_destroy(&e->wake);
    pthread_mutex_destroy(&e->lock);
    close(e->event_fd);
    free(e->file);
}

/* A client. `words` holds what each 64-bit word of the region must be. */
typedef struct owned_region {
    pagert_region region;
    uint32_t page_count; /* 0: none */
    uint64_t words[REGION_PAGES_MAX * PAGE_WORDS];
    unsigned char undefined[REGION_PAGES_MAX];
} owned_region;

typedef struct client {
    pthread_t thread;
    pagert_pump *pump;
    unsigned char *device;
    owned_region regions[REGIONS_MAX];
    uint64_t random_state, next_value, steps;
    int may_fail;
    uint64_t pinned, refused;
} client;

static int is_failure(const client *c, int code)
{
    return code == PAGERT_E_FRAMES || code == PAGERT_E_FULL || (code == PAGERT_E_TRANSFER && c->may_fail);
}

static void reserve(client *c, owned_region *r)
{
    uint32_t pages = 1 + random_below(&c->random_state, REGION_PAGES_MAX);
    int code = pagert_pump_reserve(c->pump, (uint64_t)pages * PAGE_BYTES, &r->region);
    if (code == PAGERT_E_PAGES)
        return;
    REQUIRE(code == 0);
    r->page_count = pages;
    memset(r->words, 0, sizeof r->words);
    memset(r->undefined, 0, sizeof r->undefined);
}

static void release(client *c, owned_region *r)
{
    if (chance(&c->random_state, 50)) {
        REQUIRE(pagert_pump_release(c->pump, r->region) == 0);
    } else {
        pagert_release_node *node = calloc(1, sizeof *node);
        REQUIRE(node != NULL);
        node->region = r->region;
        pagert_pump_release_later(c->pump, node);
    }
    r->page_count = 0;
}

/* Whole words only, so that the model can count in words. */
static void random_range(client *c, const owned_region *r, uint64_t *offset_bytes, uint64_t *size_bytes)
{
    uint64_t words = (uint64_t)r->page_count * PAGE_WORDS, first = 0, count = words;
    if (chance(&c->random_state, 60)) {
        first = random_bits(&c->random_state) % words;
        count = 1 + random_bits(&c->random_state) % (words - first);
    }
    *offset_bytes = first * WORD;
    *size_bytes = count * WORD;
}

static int covers(const pagert_access *a, uint32_t page)
{
    return a->mode == PAGERT_OVERWRITE && a->offset_bytes <= (uint64_t)page * PAGE_BYTES &&
           a->offset_bytes + a->size_bytes >= (uint64_t)(page + 1) * PAGE_BYTES;
}

static void compare(client *c, const owned_region *r, const pagert_access *a)
{
    const uint64_t *seen = (const void *)(c->device + a->device_bytes);
    for (uint64_t i = 0; i < a->size_bytes / WORD; i++) {
        uint64_t word = a->offset_bytes / WORD + i;
        uint32_t page = (uint32_t)(word / PAGE_WORDS);
        if (!covers(a, page) && !r->undefined[page])
            REQUIRE(seen[i] == r->words[word]);
    }
}

static void write_range(client *c, owned_region *r, const pagert_access *a)
{
    uint64_t *target = (void *)(c->device + a->device_bytes);
    for (uint64_t i = 0; i < a->size_bytes / WORD; i++)
        target[i] = r->words[a->offset_bytes / WORD + i] = c->next_value++;
    for (uint32_t page = 0; page < r->page_count; page++)
        if (a->offset_bytes <= (uint64_t)page * PAGE_BYTES &&
            a->offset_bytes + a->size_bytes >= (uint64_t)(page + 1) * PAGE_BYTES)
            r->undefined[page] = 0;
}

typedef struct held_pin {
    pagert_pin pin; /* first: a release node frees it by this address */
    pagert_access accesses[ACCESSES_MAX];
    owned_region *regions[ACCESSES_MAX];
} held_pin;

static held_pin *choose(client *c)
{
    held_pin *p = calloc(1, sizeof *p);
    REQUIRE(p != NULL);
    p->pin.accesses = p->accesses;
    uint32_t wanted = 1 + random_below(&c->random_state, ACCESSES_MAX), start = random_below(&c->random_state, REGIONS_MAX);
    for (uint32_t i = 0; i < REGIONS_MAX && p->pin.access_count < wanted; i++) {
        owned_region *r = &c->regions[(start + i) % REGIONS_MAX];
        if (r->page_count == 0)
            continue;
        uint32_t index = p->pin.access_count++;
        pagert_access *a = &p->accesses[index];
        p->regions[index] = r;
        a->region = r->region;
        a->mode = random_below(&c->random_state, 3);
        random_range(c, r, &a->offset_bytes, &a->size_bytes);
    }
    return p;
}

/* An overwrite may have begun; pages that it covers hold anything until they are written. */
static void undefine(held_pin *p)
{
    for (uint32_t i = 0; i < p->pin.access_count; i++)
        for (uint32_t page = 0; page < p->regions[i]->page_count; page++)
            if (covers(&p->accesses[i], page))
                p->regions[i]->undefined[page] = 1;
}

static int wait_for(client *c, held_pin *p)
{
    int code = pagert_pump_pin(c->pump, &p->pin, chance(&c->random_state, 50) ? 0 : SECOND_NS / 100);
    for (uint32_t tries = 0; code == 0; tries++) {
        if (chance(&c->random_state, 5)) { /* as after Ctrl-C */
            REQUIRE(pagert_pump_unpin(c->pump, &p->pin) == 0);
            return PAGERT_E_FRAMES;
        }
        REQUIRE(tries < 3000);
        code = pagert_pump_pin_wait(c->pump, &p->pin, SECOND_NS / 100);
    }
    return code;
}

static void use(client *c)
{
    held_pin *p = choose(c);
    if (p->pin.access_count == 0) {
        free(p);
        return;
    }
    int code = wait_for(c, p);
    if (code < 0) {
        REQUIRE(is_failure(c, code));
        REQUIRE(pagert_pump_unpin(c->pump, &p->pin) == PAGERT_E_STATE);
        undefine(p);
        free(p);
        c->refused++;
        if (code == PAGERT_E_FRAMES && chance(&c->random_state, 50))
            pagert_pump_wait_change(c->pump, pagert_pump_changes(c->pump), SECOND_NS / 1000);
        return;
    }
    c->pinned++;
    for (uint32_t i = 0; i < p->pin.access_count; i++)
        compare(c, p->regions[i], &p->accesses[i]);
    for (uint32_t i = 0; i < p->pin.access_count; i++)
        if (p->accesses[i].mode != PAGERT_READ)
            write_range(c, p->regions[i], &p->accesses[i]);
    if (chance(&c->random_state, 10))
        sleep_ns(random_below(&c->random_state, 200000));
    if (chance(&c->random_state, 80)) {
        REQUIRE(pagert_pump_unpin(c->pump, &p->pin) == 0);
        free(p);
    } else {
        pagert_release_node *node = calloc(1, sizeof *node);
        REQUIRE(node != NULL);
        node->pin = &p->pin;
        pagert_pump_release_later(c->pump, node);
    }
}

static void call_range(client *c, owned_region *r)
{
    uint64_t offset_bytes, size_bytes;
    random_range(c, r, &offset_bytes, &size_bytes);
    pagert_residency where;
    pagert_failure failure;
    int code;
    switch (random_below(&c->random_state, 3)) {
    case 0:
        code = pagert_pump_prefetch(c->pump, r->region, offset_bytes, size_bytes);
        REQUIRE(code == 0 || is_failure(c, code));
        break;
    case 1:
        code = pagert_pump_evict(c->pump, r->region, offset_bytes, size_bytes,
                                 chance(&c->random_state, 50), SECOND_NS / 50, &failure);
        /* Other clients' pins may need the way first, and a pin that was put aside may still hold it. */
        REQUIRE(code >= 0 || code == PAGERT_E_STATE || is_failure(c, code));
        break;
    default:
        REQUIRE(pagert_pump_locate(c->pump, r->region, offset_bytes, size_bytes, &where) == 0);
        REQUIRE(where.zero + where.pages[0] + where.pages[1] + where.pages[2] ==
                (offset_bytes + size_bytes - 1) / PAGE_BYTES - offset_bytes / PAGE_BYTES + 1);
        break;
    }
}

static void look(client *c)
{
    pagert_failure failure;
    pagert_pump_state state;
    if (chance(&c->random_state, 30)) {
        int code = pagert_pump_flush(c->pump, chance(&c->random_state, 50), SECOND_NS / 50, &failure);
        REQUIRE(code >= 0 || is_failure(c, code));
    }
    pagert_pump_get_state(c->pump, &state);
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++)
        REQUIRE(state.usage[tier].peak_frames <= state.usage[tier].capacity_frames);
    REQUIRE(state.held_frames <= state.usage[PAGERT_DEVICE].used_frames);
    REQUIRE((state.oldest_link == PAGERT_LINK_COUNT) == (state.oldest_bytes == 0));
    REQUIRE(pagert_pump_check(c->pump) == 0);
}

static void *run_client(void *context)
{
    client *c = context;
    for (uint64_t step = 0; step < c->steps; step++) {
        owned_region *r = &c->regions[random_below(&c->random_state, REGIONS_MAX)];
        uint32_t action = random_below(&c->random_state, 100);
        if (r->page_count == 0)
            reserve(c, r);
        else if (action < 5)
            release(c, r);
        else if (action < 25)
            call_range(c, r);
        else if (action < 28)
            look(c);
        else
            use(c);
    }
    for (uint32_t i = 0; i < REGIONS_MAX; i++)
        if (c->regions[i].page_count > 0)
            release(c, &c->regions[i]);
    return NULL;
}

/* Everything was released: no page, no frame, nothing in flight. */
static void require_empty(pagert_pump *pump)
{
    pagert_pump_state state;
    for (uint32_t tries = 0;; tries++) {
        pagert_pump_get_state(pump, &state);
        if (state.in_flight == 0 && state.reserved_pages == 0 && state.usage[PAGERT_DEVICE].used_frames == 0)
            break;
        REQUIRE(tries < 3000);
        pagert_pump_wait_change(pump, pagert_pump_changes(pump), SECOND_NS / 100);
    }
    REQUIRE(state.held_frames == 0);
    REQUIRE(state.usage[PAGERT_HOST].used_frames == 0);
    REQUIRE(state.usage[PAGERT_FLASH].used_frames == 0);
    REQUIRE(pagert_pump_check(pump) == 0);
}

static void open_pump(uint64_t *random_state, engine *memory, engine *flash, pagert_pump_options *options)
{
    int setup = (int)random_below(random_state, 3);
    *options = (pagert_pump_options){
        .config = {.page_bytes = PAGE_BYTES, .page_count = PAGE_COUNT,
                   .policy = chance(random_state, 50) ? pagert_policy_named("lru") : pagert_policy_named("lookahead"),
                   .transfer_pages_max = 1 + random_below(random_state, 8)},
        .memory_depth = 1 + random_below(random_state, 16),
    };
    uint32_t *frames = options->config.frame_count;
    frames[PAGERT_DEVICE] = 4 + random_below(random_state, DEVICE_FRAMES_MAX - 3);
    if (setup != 0) /* with flash below: a few frames */
        frames[PAGERT_HOST] = 1 + random_below(random_state, setup == 1 ? HOST_FRAMES_MAX : 16);
    if (setup != 1) {
        frames[PAGERT_FLASH] = 1 + random_below(random_state, FLASH_FRAMES_MAX);
        options->flash = open_engine(flash, random_state, 1);
        options->flash_depth = 1 + random_below(random_state, 16);
        options->flash_read_bytes = random_below(random_state, 3) * 3 * options->config.page_bytes;
        options->flash_write_bytes = random_below(random_state, 3) * 3 * options->config.page_bytes;
    }
    options->memory = open_engine(memory, random_state, 0);
    options->device_arena = aligned_alloc(PAGE_BYTES, (size_t)DEVICE_FRAMES_MAX * PAGE_BYTES);
    options->host_arena = aligned_alloc(PAGE_BYTES, (size_t)HOST_FRAMES_MAX * PAGE_BYTES);
    REQUIRE(options->device_arena != NULL && options->host_arena != NULL);
    memset(options->device_arena, 0xa5, (size_t)DEVICE_FRAMES_MAX * PAGE_BYTES);
}

static void run_round(uint64_t seed, uint64_t steps)
{
    static client clients[CLIENTS_MAX];
    uint64_t random_state = seed;
    engine memory, flash;
    pagert_pump_options options;
    pagert_pump *pump;
    open_pump(&random_state, &memory, &flash, &options);
    REQUIRE(pagert_pump_open(&options, &pump) == 0);
    uint32_t count = 1 + random_below(&random_state, CLIENTS_MAX);
    int has_flash = options.flash.submit != NULL;
    int may_fail = memory.failure_percent > 0 || (has_flash && flash.failure_percent > 0);
    memset(clients, 0, sizeof clients);
    for (uint32_t i = 0; i < count; i++) {
        clients[i].pump = pump;
        clients[i].device = options.device_arena;
        clients[i].random_state = random_bits(&random_state);
        clients[i].next_value = 1 + ((uint64_t)i << 48);
        clients[i].steps = steps;
        clients[i].may_fail = may_fail;
        REQUIRE(pthread_create(&clients[i].thread, NULL, run_client, &clients[i]) == 0);
    }
    for (int i = 0; i < 3; i++) { /* as an interrupted close() would */
        sleep_ns(random_below(&random_state, 2000000));
        (void)pagert_pump_stop(pump, random_below(&random_state, 1000000));
        pagert_pump_resume(pump);
    }
    uint64_t pinned = 0;
    for (uint32_t i = 0; i < count; i++) {
        pthread_join(clients[i].thread, NULL);
        pinned += clients[i].pinned;
    }
    if (chance(&random_state, 70))
        require_empty(pump);
    while (pagert_pump_stop(pump, SECOND_NS) != 0)
        ;
    pagert_pump_close(pump);
    close_engine(&memory);
    if (has_flash)
        close_engine(&flash);
    free(options.device_arena);
    free(options.host_arena);
    printf("seed %" PRIu64 ": %u clients, device %u host %u flash %u, failures %u%% %u%%, %" PRIu64 " pins\n", seed,
           count, options.config.frame_count[0], options.config.frame_count[1], options.config.frame_count[2],
           memory.failure_percent, has_flash ? flash.failure_percent : 0, pinned);
}

int main(int argument_count, char **arguments)
{
    uint64_t seed = argument_count > 1 ? strtoull(arguments[1], NULL, 10) : (uint64_t)time(NULL);
    uint64_t rounds = argument_count > 2 ? strtoull(arguments[2], NULL, 10) : 20;
    uint64_t steps = argument_count > 3 ? strtoull(arguments[3], NULL, 10) : 400;
    for (uint64_t i = 0; i < rounds; i++) {
        seed_of_run = seed + i;
        run_round(seed_of_run, steps);
        fflush(stdout);
    }
    printf("pump_stress: passed\n");
    return 0;
}
