/* SPDX-License-Identifier: Apache-2.0
 *
 * libflash on a kernel that misbehaves: short transfers of any length, EINTR, EAGAIN, EIO, ENOSPC,
 * ends of file, flipped bits, completions in any order, twice, or of nobody, submissions taken only
 * in part. A naive model holds for every block what must come back.
 *
 * The ring is simulated whole: its memory is ours, and device_step() plays the device. So a run
 * with a ring is single-threaded and repeats exactly from its seed. With threads the same faults
 * hit pread and pwrite.
 *
 * Also checked: every request comes back exactly once; bytes around a buffer stay; and whenever the
 * driver would have to wait, the event descriptor is readable or the device still has work, so
 * nobody hangs.
 *
 * usage: flash_faults [seed [rounds [folder]]]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../pagert/_core/libflash/internal.h"
#include "../../pagert/_core/libflash/uring_abi.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: seed %" PRIu64 ": %s\n", __FILE__, __LINE__, run_seed,         \
                    #condition);                                                                   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t run_seed;

/* xorshift64*, under a lock because the pool's threads draw too. */
static uint64_t random_state;
static pthread_mutex_t random_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t draw(uint64_t below)
{
    pthread_mutex_lock(&random_lock);
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    const uint64_t value = (random_state * 2685821657736338717u) >> 16;
    pthread_mutex_unlock(&random_lock);
    return value % below;
}

/* Which faults there are. After NONE, DELAYS and FLIPS every request must still succeed. */
enum { NONE, DELAYS, FLIPS, ALL };
static _Atomic int faults;
static int hit(int least, unsigned thousandths)
{
    return (atomic_load(&faults) == least || atomic_load(&faults) == ALL) &&
           draw(1000) < thousandths;
}

/* The device. It takes aligned ranges only, as direct I/O does, but may move any part of them. */
enum { DISK_BYTES = 2 << 20, SECTOR_BYTES = 512 };
static uint8_t disk[DISK_BYTES];
static uint32_t alignment; /* as found out at the opening; 1 for buffered I/O */
/* By sector: the last read from here had a bit flipped. */
static _Atomic uint8_t flipped[DISK_BYTES / SECTOR_BYTES];

/* What both backends end in. As the system calls: bytes, or -1 and errno. */
static ssize_t faulty_transfer(void *memory, size_t size_bytes, off_t offset_bytes, int writing)
{
    static const int errors[] = {EINTR, EAGAIN, EIO, ENOSPC};
    CHECK(offset_bytes % alignment == 0 && size_bytes % alignment == 0);
    CHECK((uint64_t)offset_bytes + size_bytes <= DISK_BYTES);
    if (hit(DELAYS, 60)) {
        errno = errors[draw(2)];
        return -1;
    }
    if (hit(ALL, 8)) {
        errno = errors[writing ? 2 + draw(2) : 2];
        return -1;
    }
    if (hit(ALL, 4))
        return 0;
    if (hit(DELAYS, 150))
        size_bytes = 1 + draw(size_bytes); /* any length, aligned or not */
    if (writing)
        memcpy(disk + offset_bytes, memory, size_bytes);
    else
        memcpy(memory, disk + offset_bytes, size_bytes);
    if (!writing) {
        _Atomic uint8_t *before = &flipped[offset_bytes / SECTOR_BYTES];
        const int again = atomic_load(&faults) == FLIPS && atomic_load(before);
        atomic_store(before, !again && hit(FLIPS, 100));
        if (atomic_load(before))
            ((uint8_t *)memory)[draw(size_bytes)] ^= (uint8_t)(1u << draw(8));
    }
    return (ssize_t)size_bytes;
}

static ssize_t faulty_pread(int fd, void *target, size_t size_bytes, off_t offset_bytes)
{
    (void)fd;
    return faulty_transfer(target, size_bytes, offset_bytes, 0);
}

static ssize_t faulty_pwrite(int fd, const void *source, size_t size_bytes, off_t offset_bytes)
{
    (void)fd;
    return faulty_transfer((void *)(uintptr_t)source, size_bytes, offset_bytes, 1);
}

/* The simulated ring. */
enum { RING_ENTRIES_MAX = 256, TAIL_WORD = 1, MASK_WORD = 2, ARRAY_WORD = 4, COMPLETION_WORD = 4 };
static struct {
    uint32_t entry_count;
    uint32_t *submission, *completion; /* words: head, tail, mask, -, array or completions */
    ring_submission *entries;
    ring_submission pending[RING_ENTRIES_MAX];
    uint32_t pending_count;
    int event_fd;
} ring;

static int fake_setup(unsigned entry_count, void *parameters)
{
    ring_parameters *answer = parameters;
    CHECK(entry_count <= RING_ENTRIES_MAX && (entry_count & (entry_count - 1)) == 0);
    memset(&ring, 0, sizeof ring);
    ring.entry_count = entry_count;
    ring.event_fd = -1;
    answer->submission_count = entry_count;
    answer->completion_count = 2 * entry_count;
    answer->submission = (ring_submission_offsets){.head = 0, .tail = 4, .mask = 8, .array = 16};
    answer->completion =
        (ring_completion_offsets){.head = 0, .tail = 4, .mask = 8, .completions = 16};
    return dup(0);
}

static void *fake_map(size_t size_bytes, int fd, off_t offset_bytes)
{
    (void)fd;
    void *memory = calloc(1, size_bytes);
    if (offset_bytes == RING_MAP_SUBMISSIONS) {
        ring.submission = memory;
        ring.submission[MASK_WORD] = ring.entry_count - 1;
    } else if (offset_bytes == RING_MAP_COMPLETIONS) {
        ring.completion = memory;
        ring.completion[MASK_WORD] = 2 * ring.entry_count - 1;
    } else {
        ring.entries = memory;
    }
    return memory;
}

static void fake_unmap(void *address, size_t size_bytes)
{
    (void)size_bytes;
    free(address);
}

static void complete(uint64_t user_data, int32_t result)
{
    const uint32_t tail = ring.completion[TAIL_WORD];
    if (tail - ring.completion[0] == 2 * ring.entry_count)
        return; /* only stray ones come so many */
    ring_completion *completions = (ring_completion *)(void *)(ring.completion + COMPLETION_WORD);
    completions[tail & ring.completion[MASK_WORD]] = (ring_completion){user_data, result, 0};
    ring.completion[TAIL_WORD] = tail + 1;
    const uint64_t one = 1;
    if (ring.event_fd >= 0)
        CHECK(write(ring.event_fd, &one, sizeof one) == sizeof one);
}

/* Finish one pending operation, whichever. */
static void device_step(void)
{
    if (!ring.pending_count)
        return;
    const uint32_t index = (uint32_t)draw(ring.pending_count);
    const ring_submission operation = ring.pending[index];
    ring.pending[index] = ring.pending[--ring.pending_count];
    const struct iovec *vector = (const struct iovec *)(uintptr_t)operation.address;
    CHECK(operation.length == 1);
    const ssize_t moved =
        faulty_transfer(vector->iov_base, vector->iov_len, (off_t)operation.offset_bytes,
                        operation.operation == RING_WRITEV);
    const int error = errno;
    const uint32_t room = 2 * ring.entry_count - (ring.completion[TAIL_WORD] - ring.completion[0]);
    complete(operation.user_data, moved < 0 ? -error : (int32_t)moved);
    if (room > ring.entry_count && hit(DELAYS, 30)) /* twice, or for an earlier attempt */
        complete(operation.user_data - (draw(3) << 32), (int32_t)draw(65536));
    if (room > ring.entry_count && hit(DELAYS, 10))
        complete(draw(UINT64_MAX), 4096);
}

static int fake_enter(int fd, unsigned submit_count, unsigned complete_count, unsigned flags)
{
    (void)fd;
    if (hit(DELAYS, 150)) {
        errno = (const int[]){EINTR, EAGAIN, EBUSY}[draw(3)];
        return -1;
    }
    if (submit_count > 1 && hit(DELAYS, 200))
        submit_count = 1 + (unsigned)draw(submit_count);
    const uint32_t *array = ring.submission + ARRAY_WORD;
    for (unsigned i = 0; i < submit_count; i++) {
        const uint32_t head = ring.submission[0];
        CHECK(head != ring.submission[TAIL_WORD]);
        CHECK(ring.pending_count < RING_ENTRIES_MAX);
        ring.pending[ring.pending_count++] = ring.entries[array[head & ring.submission[MASK_WORD]]];
        ring.submission[0] = head + 1;
    }
    while ((flags & RING_ENTER_WAIT) && complete_count && ring.pending_count &&
           ring.completion[0] == ring.completion[TAIL_WORD])
        device_step();
    return (int)submit_count;
}

static int fake_register_event(int fd, int event_fd)
{
    (void)fd;
    ring.event_fd = event_fd;
    return 0;
}

static const flash_system faulty_kernel = {
    .pread = faulty_pread,
    .pwrite = faulty_pwrite,
    .ring_setup = fake_setup,
    .ring_map = fake_map,
    .ring_unmap = fake_unmap,
    .ring_enter = fake_enter,
    .ring_register_event = fake_register_event,
    .ring_close = close,
};

/* The model. A block's content is a number; 0 stands for 'reading it says ENODATA', which holds
 * before the first write and after one that failed. */
enum { BLOCK_MAX = 192, REQUEST_BLOCKS_MAX = 24, IN_FLIGHT_MAX = 80, CANARY_BYTES = 4096 };
static struct {
    uint64_t content;
    int busy;
} model[BLOCK_MAX];
static uint32_t block_bytes, block_count;

typedef struct driven {
    pagert_request request;
    uint8_t *memory;
    uint64_t content; /* of the first block; the next ones count on */
    int in_flight;
} driven;
static driven requests[IN_FLIGHT_MAX];

static uint64_t word_of(uint64_t content, uint64_t index)
{
    return (content + 1) * 0x9e3779b97f4a7c15u ^ (index * 0xff51afd7ed558ccdu);
}

static void fill_block(uint8_t *memory, uint64_t content)
{
    for (uint32_t at = 0; at < block_bytes; at += 8) {
        const uint64_t word = word_of(content, at / 8);
        memcpy(memory + at, &word, 8);
    }
}

static int block_holds(const uint8_t *memory, uint64_t content)
{
    for (uint32_t at = 0; at < block_bytes; at += 8) {
        const uint64_t word = word_of(content, at / 8);
        if (memcmp(memory + at, &word, 8) != 0)
            return 0;
    }
    return 1;
}

/* Make one random request; 0 where the blocks drawn are busy. */
static int make_request(driven *item, uint64_t *content)
{
    const uint32_t first = (uint32_t)draw(block_count);
    uint32_t count = 1 + (uint32_t)draw(REQUEST_BLOCKS_MAX);
    if (count > block_count - first)
        count = block_count - first;
    for (uint32_t block = first; block < first + count; block++)
        if (model[block].busy)
            return 0;
    for (uint32_t block = first; block < first + count; block++)
        model[block].busy = 1;
    const int writing = draw(2) != 0;
    item->request = (pagert_request){.kind = writing ? PAGERT_REQUEST_WRITE : PAGERT_REQUEST_READ,
                                     .result = 1,
                                     .target = item->memory,
                                     .source = item->memory,
                                     .offset_bytes = (uint64_t)first * block_bytes,
                                     .size_bytes = (uint64_t)count * block_bytes,
                                     .tag = item};
    memset(item->memory - CANARY_BYTES, 0xa5, CANARY_BYTES);
    memset(item->memory + item->request.size_bytes, 0x5a, CANARY_BYTES);
    if (writing) {
        item->content = *content;
        *content += count;
        for (uint32_t i = 0; i < count; i++)
            fill_block(item->memory + (uint64_t)i * block_bytes, item->content + i);
    } else {
        memset(item->memory, 0xcc, item->request.size_bytes);
    }
    return 1;
}

static void check_read(const driven *item, uint32_t first, uint32_t count)
{
    const int32_t result = item->request.result;
    if (result == -ENODATA) {
        int unreadable = 0;
        for (uint32_t block = first; block < first + count; block++)
            unreadable |= !model[block].content;
        CHECK(unreadable);
        return;
    }
    if (result != 0) {
        CHECK(atomic_load(&faults) == ALL);
        CHECK(result == -EIO || result == -EBADMSG);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        CHECK(model[first + i].content);
        CHECK(block_holds(item->memory + (uint64_t)i * block_bytes, model[first + i].content));
    }
}

static void check_write(const driven *item, uint32_t first, uint32_t count)
{
    const int32_t result = item->request.result;
    if (result) {
        CHECK(atomic_load(&faults) == ALL);
        CHECK(result == -EIO || result == -ENOSPC);
    }
    for (uint32_t i = 0; i < count; i++)
        model[first + i].content = result ? 0 : item->content + i;
}

static void check_finished(driven *item)
{
    const pagert_request *request = &item->request;
    const uint32_t first = (uint32_t)(request->offset_bytes / block_bytes);
    const uint32_t count = (uint32_t)(request->size_bytes / block_bytes);
    CHECK(item->in_flight);
    item->in_flight = 0;
    for (uint32_t i = 0; i < CANARY_BYTES; i++)
        CHECK(item->memory[-1 - (int64_t)i] == 0xa5 &&
              item->memory[request->size_bytes + i] == 0x5a);
    if (request->result)
        CHECK(request->failed_offset >= request->offset_bytes &&
              request->failed_offset < request->offset_bytes + request->size_bytes);
    if (request->kind == PAGERT_REQUEST_READ)
        check_read(item, first, count);
    else
        check_write(item, first, count);
    for (uint32_t block = first; block < first + count; block++)
        model[block].busy = 0;
}

/* Wait as the pump does. With a ring the device moves on only here, so a wake-up that is lost is
 * seen. */
static uint32_t wait_and_reap(pagert_engine engine, int with_ring)
{
    struct pollfd descriptor = {.fd = engine.event_fd, .events = POLLIN};
    if (with_ring) {
        for (uint64_t steps = draw(4); steps; steps--)
            device_step();
        while (poll(&descriptor, 1, 0) == 0) {
            CHECK(ring.pending_count); /* else nothing would ever wake the caller */
            device_step();
        }
    } else {
        CHECK(poll(&descriptor, 1, 60000) == 1);
    }
    pagert_request *finished[8];
    const int count = engine.reap(engine.context, finished, 1 + (int)draw(8));
    CHECK(count >= 0);
    for (int i = 0; i < count; i++)
        check_finished(finished[i]->tag);
    return (uint32_t)count;
}

static void drive(pagert_engine engine, int with_ring, uint32_t total, uint64_t *content)
{
    uint32_t submitted = 0, finished = 0;
    while (finished < total) {
        const uint32_t before = submitted;
        for (uint64_t tries = draw(12); tries && submitted < total; tries--) {
            driven *item = &requests[draw(IN_FLIGHT_MAX)];
            if (item->in_flight || !make_request(item, content))
                continue;
            const int code = engine.submit(engine.context, &item->request);
            if (code == -EAGAIN) {
                const uint64_t first = item->request.offset_bytes / block_bytes;
                for (uint64_t i = 0; i < item->request.size_bytes / block_bytes; i++)
                    model[first + i].busy = 0;
                break;
            }
            CHECK(code == 0);
            item->in_flight = 1;
            submitted++;
        }
        if (submitted > before)
            CHECK(engine.flush(engine.context) == 0);
        if (submitted > finished)
            finished += wait_and_reap(engine, with_ring);
    }
}

static void run(const char *folder, int with_ring, uint32_t request_bytes, uint32_t block,
                uint32_t total)
{
    block_bytes = block;
    block_count = block > 4096 ? 48 : BLOCK_MAX;
    memset(model, 0, sizeof model);
    const size_t memory_bytes = REQUEST_BLOCKS_MAX * (size_t)block + 2 * CANARY_BYTES;
    for (int i = 0; i < IN_FLIGHT_MAX; i++) {
        void *memory = aligned_alloc(4096, memory_bytes);
        CHECK(memory);
        requests[i] = (driven){.memory = (uint8_t *)memory + CANARY_BYTES};
    }
    const pagert_flash_options options = {
        .folder = folder,
        .capacity_bytes = (uint64_t)block_count * block,
        .block_bytes = block,
        .depth = 1 + (uint32_t)draw(8),
        .request_bytes = request_bytes,
        .backend = with_ring ? PAGERT_BACKEND_IO_URING : PAGERT_BACKEND_THREADS,
    };
    pagert_flash *flash;
    pagert_flash_info info;
    alignment = 1;
    atomic_store(&faults, NONE);
    CHECK(pagert_flash_open_on(&faulty_kernel, &options, &flash, &info) == 0);
    alignment = info.offset_alignment;
    CHECK(alignment % SECTOR_BYTES == 0 || !info.direct);
    const pagert_engine engine = pagert_flash_engine(flash);
    uint64_t content = 1;
    for (int kind = NONE; kind <= ALL; kind++) {
        atomic_store(&faults, kind);
        drive(engine, with_ring, total, &content);
    }
    atomic_store(&faults, NONE); /* whatever happened before, now all must be well */
    drive(engine, with_ring, total, &content);

    atomic_store(&faults, ALL); /* and closing waits for what the device still has */
    for (int i = 0; i < IN_FLIGHT_MAX; i++)
        if (make_request(&requests[i], &content) &&
            engine.submit(engine.context, &requests[i].request) == -EAGAIN)
            break;
    CHECK(engine.flush(engine.context) == 0);
    pagert_flash_close(flash);
    for (int i = 0; i < IN_FLIGHT_MAX; i++)
        free(requests[i].memory - CANARY_BYTES);
}

int main(int count, char **arguments)
{
    const uint64_t seed = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    const uint64_t rounds = count > 2 ? strtoull(arguments[2], NULL, 10) : 6;
    const char *folder = count > 3 ? arguments[3] : ".";
    for (uint64_t round = 0; round < rounds; round++) {
        run_seed = seed + round;
        random_state = run_seed * 0x9e3779b97f4a7c15u + 1;
        run(folder, 1, 16384, 4096, 700); /* pieces of several blocks */
        run(folder, 1, 8192, 32768, 200); /* blocks of several pieces */
        run(folder, 0, 16384, 4096, 200);
        run(folder, 0, 8192, 32768, 50);
    }
    printf("flash_faults: seeds %" PRIu64 " to %" PRIu64 " passed\n", seed, seed + rounds - 1);
    return 0;
}
