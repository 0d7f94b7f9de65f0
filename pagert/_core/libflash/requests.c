/* SPDX-License-Identifier: Apache-2.0
 *
 * Requests from submit() to reap(): cut into pieces, handed to the backend as far as its depth
 * allows, and given back when their last piece is finished. Only the caller's thread runs here.
 *
 * With a ring the checksums are computed here too, while the device works: a write's after it was
 * started, a read's when it has arrived. reap() does so one piece at a time and refills the device
 * in between, so that the checksums of one piece overlap with the transfer of the others. Threads
 * compute their own.
 */
#include <errno.h>
#include <unistd.h>

#include "../worker.h"
#include "internal.h"

/* Checksums in one reap() that has nothing to give back yet: a few hundred microseconds. The event
 * descriptor stays readable while there is more to do, so the caller comes back. */
enum { CHECKSUM_BYTES_PER_REAP = 4 << 20 };

static void give_back(pagert_flash *flash, pagert_request *request, int32_t result,
                      uint64_t failed_offset)
{
    request->result = result;
    request->failed_offset = failed_offset;
    request->next = NULL;
    if (flash->finished_first)
        flash->finished_last->next = request;
    else
        flash->finished_first = request;
    flash->finished_last = request;
}

static void stop_cutting(pagert_flash *flash, flash_entry *entry)
{
    entry->cut_bytes = entry->request->size_bytes;
    if (flash->waiting_first == entry)
        flash->waiting_first = entry->next;
}

static void finish_entry(pagert_flash *flash, flash_entry *entry)
{
    const pagert_request *request = entry->request;
    /* Some pieces of a failed write are new, some old: no block of it may be taken for whole. */
    if (entry->result && request->kind == PAGERT_REQUEST_WRITE)
        piece_forget_checksums(flash, request->offset_bytes, request->size_bytes);
    give_back(flash, entry->request, entry->result, entry->failed_offset);
    entry->next = flash->free_entries;
    flash->free_entries = entry;
}

static void note_failure(pagert_flash *flash, flash_entry *entry, int32_t result,
                         uint64_t failed_offset)
{
    if (!entry->result || failed_offset < entry->failed_offset) {
        entry->result = result;
        entry->failed_offset = failed_offset;
    }
    if (entry->cut_bytes < entry->request->size_bytes)
        stop_cutting(flash, entry);
}

/* The piece is through, for better or worse. The backend no longer has it. */
void flash_finish_piece(pagert_flash *flash, flash_piece *piece, int32_t result)
{
    flash_entry *entry = piece->entry;
    if (result)
        note_failure(flash, entry, result, piece->failed_offset);
    else if (piece->write)
        for (uint32_t at = 0; at < piece->size_bytes; at += flash->unit_bytes)
            flash->written[(piece->offset_bytes + at) / flash->unit_bytes] = 1;
    piece_push(&flash->free_pieces, piece);
    if (--entry->piece_count == 0 && entry->cut_bytes == entry->request->size_bytes)
        finish_entry(flash, entry);
}

static void cut_piece(pagert_flash *flash, flash_entry *entry)
{
    const pagert_request *request = entry->request;
    flash_piece *piece = piece_pop(&flash->free_pieces);
    const uint64_t left_bytes = request->size_bytes - entry->cut_bytes;
    piece->entry = entry;
    piece->write = request->kind == PAGERT_REQUEST_WRITE;
    /* The kernel only reads what a write's vector points to; the type has no const. */
    piece->memory =
        (uint8_t *)(piece->write ? (uintptr_t)request->source : (uintptr_t)request->target) +
        entry->cut_bytes;
    piece->offset_bytes = request->offset_bytes + entry->cut_bytes;
    piece->size_bytes = left_bytes < flash->piece_bytes ? (uint32_t)left_bytes : flash->piece_bytes;
    piece->done_bytes = 0;
    piece->stall_count = 0;
    piece->reread_count = 0;
    piece->moved = 0;
    piece->summed = 0;

    if (!piece->write) {
        int64_t hole = piece_unwritten_offset(flash, piece->offset_bytes, piece->size_bytes);
        if (hole >= 0) {
            piece_push(&flash->free_pieces, piece);
            note_failure(flash, entry, -ENODATA, (uint64_t)hole);
            if (entry->piece_count == 0)
                finish_entry(flash, entry);
            return;
        }
    }
    entry->piece_count++;
    entry->cut_bytes += piece->size_bytes;
    if (entry->cut_bytes == request->size_bytes)
        stop_cutting(flash, entry);
    flash->backend_count++;
    if (flash->ring) {
        flash_ring_queue(flash, piece);
        if (piece->write)
            piece_push(&flash->unsummed, piece);
    } else {
        flash_pool_queue(flash, piece);
    }
}

static void start_pieces(pagert_flash *flash)
{
    while (flash->waiting_first && flash->backend_count < flash->depth && flash->free_pieces.first)
        cut_piece(flash, flash->waiting_first);
    if (flash->ring)
        flash_ring_enter(flash);
}

static void harvest(pagert_flash *flash)
{
    if (flash->ring)
        flash_ring_harvest(flash);
    else
        flash_pool_harvest(flash);
}

/* Ring only. Compute the checksums of one piece; how many bytes that took. */
static uint32_t sum_one_piece(pagert_flash *flash)
{
    flash_piece *piece = piece_pop(&flash->unsummed);
    const int verdict = piece_checksums(flash, piece);
    const uint32_t size_bytes = piece->size_bytes;
    if (verdict == PIECE_AGAIN) {
        piece->moved = 0;
        flash->backend_count++; /* above depth for a moment; the ring has room for every piece */
        flash_ring_queue(flash, piece);
    } else {
        piece->summed = 1;
        if (piece->moved)
            flash_finish_piece(flash, piece, verdict ? verdict : piece->result);
    }
    return size_bytes;
}

static int misaligned(const pagert_flash *flash, const pagert_request *request)
{
    const uintptr_t address = request->kind == PAGERT_REQUEST_WRITE ? (uintptr_t)request->source
                                                                    : (uintptr_t)request->target;
    return request->offset_bytes % flash->block_bytes || request->size_bytes % flash->block_bytes ||
           request->offset_bytes > flash->file.capacity_bytes ||
           request->size_bytes > flash->file.capacity_bytes - request->offset_bytes || !address ||
           (flash->file.direct && address % flash->file.memory_alignment);
}

int flash_submit(void *context, pagert_request *request)
{
    pagert_flash *flash = context;
    if (flash->pid != getpid())
        return -EPERM;
    const int known = request->kind == PAGERT_REQUEST_READ || request->kind == PAGERT_REQUEST_WRITE;
    if (!known || request->size_bytes == 0 || misaligned(flash, request)) {
        const int nothing_to_do = known && request->size_bytes == 0;
        give_back(flash, request, nothing_to_do ? 0 : -EINVAL,
                  nothing_to_do ? 0 : request->offset_bytes);
        pagert_event_signal(flash->event_fd);
        return 0;
    }
    flash_entry *entry = flash->free_entries;
    if (!entry)
        return -EAGAIN;
    flash->free_entries = entry->next;
    *entry = (flash_entry){.request = request};
    if (flash->waiting_first)
        flash->waiting_last->next = entry;
    else
        flash->waiting_first = entry;
    flash->waiting_last = entry;
    return 0;
}

int flash_flush(void *context)
{
    pagert_flash *flash = context;
    if (flash->pid != getpid())
        return -EPERM;
    start_pieces(flash);
    if (flash->finished_first || flash->unsummed.first)
        pagert_event_signal(flash->event_fd);
    return 0;
}

int flash_reap(void *context, pagert_request **finished, int max)
{
    pagert_flash *flash = context;
    if (flash->pid != getpid())
        return -EPERM;
    /* First: what completes after this line makes the descriptor readable again. */
    pagert_event_drain(flash->event_fd);
    harvest(flash);
    start_pieces(flash);
    uint32_t summed_bytes = 0;
    while (!flash->finished_first && flash->unsummed.first &&
           summed_bytes < CHECKSUM_BYTES_PER_REAP) {
        summed_bytes += sum_one_piece(flash);
        harvest(flash);
        start_pieces(flash);
    }
    int count = 0;
    while (count < max && flash->finished_first) {
        pagert_request *request = flash->finished_first;
        flash->finished_first = request->next;
        request->next = NULL;
        finished[count++] = request;
    }
    if (flash->finished_first || flash->unsummed.first)
        pagert_event_signal(flash->event_fd);
    return count;
}
