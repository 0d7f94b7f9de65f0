/* SPDX-License-Identifier: Apache-2.0
 *
 * Pieces through a kernel ring. The caller's thread fills submissions, tells the kernel, and looks
 * at the completions; the kernel signals the event descriptor for each.
 *
 * The ring has room for every piece there is, so neither side can overflow. A completion names its
 * piece by index and generation: one that is not expected, from whatever source, is ignored.
 *
 * Invariant: queued_count + in_kernel_count == backend_count of the flash.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "../worker.h"
#include "internal.h"
#include "uring_abi.h"

struct flash_ring {
    int fd;
    uint32_t queued_count; /* submissions that the kernel has not taken yet */
    uint32_t in_kernel_count;
    uint32_t submission_mask, completion_mask;
    _Atomic uint32_t *submission_head, *submission_tail, *completion_head, *completion_tail;
    uint32_t *submission_array;
    ring_submission *submissions;
    ring_completion *completions;
    void *submission_map, *completion_map, *entries_map;
    size_t submission_map_bytes, completion_map_bytes, entries_map_bytes;
};

static void *map(const flash_system *system, int fd, size_t size_bytes, off_t offset_bytes)
{
    return system->ring_map(size_bytes, fd, offset_bytes);
}

static void release_ring(const flash_system *system, flash_ring *ring)
{
    if (ring->entries_map)
        system->ring_unmap(ring->entries_map, ring->entries_map_bytes);
    if (ring->completion_map)
        system->ring_unmap(ring->completion_map, ring->completion_map_bytes);
    if (ring->submission_map)
        system->ring_unmap(ring->submission_map, ring->submission_map_bytes);
    if (ring->fd >= 0)
        (void)system->ring_close(ring->fd);
    free(ring);
}

static int map_ring(const flash_system *system, flash_ring *ring, const ring_parameters *parameters)
{
    const ring_submission_offsets *submission = &parameters->submission;
    const ring_completion_offsets *completion = &parameters->completion;
    ring->submission_map_bytes =
        submission->array + parameters->submission_count * sizeof(uint32_t);
    ring->completion_map_bytes =
        completion->completions + parameters->completion_count * sizeof(ring_completion);
    ring->entries_map_bytes = parameters->submission_count * sizeof(ring_submission);
    ring->submission_map = map(system, ring->fd, ring->submission_map_bytes, RING_MAP_SUBMISSIONS);
    ring->completion_map = map(system, ring->fd, ring->completion_map_bytes, RING_MAP_COMPLETIONS);
    ring->entries_map = map(system, ring->fd, ring->entries_map_bytes, RING_MAP_ENTRIES);
    if (!ring->submission_map || !ring->completion_map || !ring->entries_map)
        return -ENOMEM;

    uint8_t *base = ring->submission_map;
    ring->submission_head = (_Atomic uint32_t *)(void *)(base + submission->head);
    ring->submission_tail = (_Atomic uint32_t *)(void *)(base + submission->tail);
    ring->submission_mask = *(uint32_t *)(void *)(base + submission->mask);
    ring->submission_array = (uint32_t *)(void *)(base + submission->array);
    ring->submissions = ring->entries_map;
    base = ring->completion_map;
    ring->completion_head = (_Atomic uint32_t *)(void *)(base + completion->head);
    ring->completion_tail = (_Atomic uint32_t *)(void *)(base + completion->tail);
    ring->completion_mask = *(uint32_t *)(void *)(base + completion->mask);
    ring->completions = (ring_completion *)(void *)(base + completion->completions);
    return 0;
}

static uint64_t piece_name(const pagert_flash *flash, const flash_piece *piece)
{
    return (uint64_t)piece->generation << 32 | (uint64_t)(piece - flash->pieces);
}

void flash_ring_queue(pagert_flash *flash, flash_piece *piece)
{
    flash_ring *ring = flash->ring;
    piece->vector = (struct iovec){.iov_base = piece->memory + piece->done_bytes,
                                   .iov_len = piece->size_bytes - piece->done_bytes};
    /* At each attempt: a second completion of the last one is not this one's. */
    piece->generation++;
    const uint32_t tail = atomic_load_explicit(ring->submission_tail, memory_order_relaxed);
    const uint32_t index = tail & ring->submission_mask;
    ring->submissions[index] = (ring_submission){
        .operation = piece->write ? RING_WRITEV : RING_READV,
        .flags = piece->stall_count ? RING_FLAG_ASYNC : 0,
        .fd = flash->file.fd,
        .offset_bytes = piece->offset_bytes + piece->done_bytes,
        .address = (uint64_t)(uintptr_t)&piece->vector,
        .length = 1,
        .user_data = piece_name(flash, piece),
    };
    ring->submission_array[index] = index;
    atomic_store_explicit(ring->submission_tail, tail + 1, memory_order_release);
    piece->in_kernel = 1;
    ring->queued_count++;
}

/* The kernel is through with the piece: with its bytes or with an error. */
static void piece_moved(pagert_flash *flash, flash_piece *piece, int32_t result)
{
    flash->backend_count--;
    piece->result = result;
    piece->moved = 1;
    if (piece->write ? piece->summed : result < 0)
        flash_finish_piece(flash, piece, result);
    else if (!piece->write)
        piece_push(&flash->unsummed, piece);
}

/* The kernel takes no submissions, and not just for the moment: take back what it has not seen. */
static void fail_queued(pagert_flash *flash, int32_t result)
{
    flash_ring *ring = flash->ring;
    const uint32_t head = atomic_load_explicit(ring->submission_head, memory_order_acquire);
    uint32_t tail = atomic_load_explicit(ring->submission_tail, memory_order_relaxed);
    while (tail != head) {
        tail--;
        const uint64_t name = ring->submissions[tail & ring->submission_mask].user_data;
        flash_piece *piece = &flash->pieces[(uint32_t)name];
        piece->in_kernel = 0;
        piece->failed_offset = piece->offset_bytes + piece->done_bytes;
        piece_moved(flash, piece, result);
    }
    atomic_store_explicit(ring->submission_tail, head, memory_order_release);
    ring->queued_count = 0;
}

void flash_ring_enter(pagert_flash *flash)
{
    flash_ring *ring = flash->ring;
    while (ring->queued_count) {
        const int taken = flash->system->ring_enter(ring->fd, ring->queued_count, 0, 0);
        if (taken > 0) {
            ring->queued_count -= (uint32_t)taken;
            ring->in_kernel_count += (uint32_t)taken;
        } else if (taken < 0 && errno == EINTR) {
            continue;
        } else if (taken == 0 || errno == EAGAIN || errno == EBUSY) {
            /* Short of memory for a moment. A completion or this signal brings the caller back. */
            if (!ring->in_kernel_count)
                pagert_event_signal(flash->event_fd);
            return;
        } else {
            fail_queued(flash, -errno);
            return;
        }
    }
}

static void piece_completed(pagert_flash *flash, flash_piece *piece, int32_t result)
{
    piece->in_kernel = 0;
    flash->ring->in_kernel_count--;
    const int verdict = piece_advance(flash, piece, result);
    if (verdict == PIECE_AGAIN)
        flash_ring_queue(flash, piece);
    else
        piece_moved(flash, piece, verdict);
}

/* Look at every completion that is there. */
void flash_ring_harvest(pagert_flash *flash)
{
    flash_ring *ring = flash->ring;
    uint32_t head = atomic_load_explicit(ring->completion_head, memory_order_relaxed);
    while (head != atomic_load_explicit(ring->completion_tail, memory_order_acquire)) {
        const ring_completion completion = ring->completions[head & ring->completion_mask];
        atomic_store_explicit(ring->completion_head, ++head, memory_order_release);
        const uint32_t index = (uint32_t)completion.user_data;
        if (index >= flash->piece_count)
            continue;
        flash_piece *piece = &flash->pieces[index];
        if (piece->in_kernel && piece_name(flash, piece) == completion.user_data)
            piece_completed(flash, piece, completion.result);
    }
}

/* A real read through the ring: a sandbox may allow to set one up and then refuse to use it. */
static int probe_ring(pagert_flash *flash, flash_ring *ring)
{
    const uint32_t size_bytes = flash->unit_bytes;
    const uint32_t alignment = flash->file.memory_alignment;
    void *memory = aligned_alloc(alignment > 4096 ? alignment : 4096, size_bytes);
    if (!memory)
        return -ENOMEM;
    flash->ring = ring;
    flash_piece piece = {.memory = memory, .size_bytes = size_bytes};
    piece.vector = (struct iovec){.iov_base = memory, .iov_len = size_bytes};
    ring->submissions[0] = (ring_submission){.operation = RING_READV,
                                             .fd = flash->file.fd,
                                             .address = (uint64_t)(uintptr_t)&piece.vector,
                                             .length = 1};
    ring->submission_array[0] = 0;
    atomic_store_explicit(ring->submission_tail, 1, memory_order_release);
    int code;
    do
        code = flash->system->ring_enter(ring->fd, 1, 1, RING_ENTER_WAIT);
    while (code < 0 && errno == EINTR && *ring->submission_head == 0);
    if (code < 0 && errno != EINTR) {
        code = -errno;
        goto release;
    }
    const uint32_t head = atomic_load_explicit(ring->completion_head, memory_order_relaxed);
    while (head == atomic_load_explicit(ring->completion_tail, memory_order_acquire))
        if (flash->system->ring_enter(ring->fd, 0, 1, RING_ENTER_WAIT) < 0 && errno != EINTR)
            break;
    if (head == atomic_load_explicit(ring->completion_tail, memory_order_acquire)) {
        /* The read may still arrive: its memory must stay. One page, once, on a kernel this odd. */
        code = -EIO;
        memory = NULL;
        goto release;
    }
    code = ring->completions[head & ring->completion_mask].result;
    atomic_store_explicit(ring->completion_head, head + 1, memory_order_release);
    if (code >= 0)
        code = (uint32_t)code == size_bytes ? 0 : -EIO;
release:
    free(memory);
    flash->ring = NULL;
    return code;
}

int flash_ring_open(pagert_flash *flash, flash_ring **opened)
{
    flash_ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return -ENOMEM;
    uint32_t entry_count = 1;
    while (entry_count < flash->piece_count)
        entry_count *= 2;
    ring_parameters parameters = {0};
    ring->fd = flash->system->ring_setup(entry_count, &parameters);
    int code = ring->fd < 0 ? -errno : 0;
    if (!code)
        code = map_ring(flash->system, ring, &parameters);
    if (!code)
        code = probe_ring(flash, ring);
    if (!code && flash->system->ring_register_event(ring->fd, flash->event_fd) < 0)
        code = -errno;
    if (code) {
        release_ring(flash->system, ring);
        return code;
    }
    *opened = ring;
    return 0;
}

void flash_ring_close(pagert_flash *flash)
{
    flash_ring *ring = flash->ring;
    /* In a forked child the requests are the parent's, and so is the wait. */
    while (flash->pid == getpid() && ring->in_kernel_count) {
        if (flash->system->ring_enter(ring->fd, 0, 1, RING_ENTER_WAIT) < 0 && errno != EINTR)
            usleep(1000); /* entering is refused by now; the completions come all the same */
        flash_ring_harvest(flash);
    }
    release_ring(flash->system, ring);
    flash->ring = NULL;
}
