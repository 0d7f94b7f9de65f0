/* SPDX-License-Identifier: Apache-2.0
 *
 * What a system call's result means for a piece, and the checksums of its units. Called by the
 * thread that has the piece: a worker of the pool, or the caller's thread with a ring. Never
 * touches lists of the flash.
 */
#include <errno.h>
#include <string.h>

#include "internal.h"

/* Attempts in a row without progress before a piece fails: enough to ride out signals and kernels
 * that are short of memory for a moment, and an end for those that never go on. */
enum { STALL_LIMIT = 64 };

void piece_push(piece_list *list, flash_piece *piece)
{
    piece->next = NULL;
    if (list->first)
        list->last->next = piece;
    else
        list->first = piece;
    list->last = piece;
}

flash_piece *piece_pop(piece_list *list)
{
    flash_piece *piece = list->first;
    if (piece)
        list->first = piece->next;
    return piece;
}

/* `moved` is what the kernel said: bytes, or -errno. 0: the piece is complete. PIECE_AGAIN: call
 * the kernel again for the rest. Negative: failed. */
int piece_advance(const pagert_flash *flash, flash_piece *piece, int64_t moved)
{
    const uint32_t left_bytes = piece->size_bytes - piece->done_bytes;
    piece->failed_offset = piece->offset_bytes + piece->done_bytes;
    if (moved == -EINTR || moved == -EAGAIN)
        return ++piece->stall_count < STALL_LIMIT ? PIECE_AGAIN : (int)moved;
    if (moved < 0)
        return (int)moved;
    if (moved == 0 || moved > left_bytes)
        return -EIO; /* the file ends before its size, or the kernel counts wrong */

    uint32_t done_bytes = piece->done_bytes + (uint32_t)moved;
    if (done_bytes < piece->size_bytes && flash->file.direct)
        done_bytes -= done_bytes % flash->file.offset_alignment;
    if (done_bytes == piece->done_bytes)
        return ++piece->stall_count < STALL_LIMIT ? PIECE_AGAIN : -EIO;
    piece->stall_count = 0;
    piece->done_bytes = done_bytes;
    return done_bytes == piece->size_bytes ? 0 : PIECE_AGAIN;
}

/* Store the checksums of a write, or verify those of a read. 0: done. PIECE_AGAIN: a read that does
 * not match is to be read once more. -EBADMSG: the second time neither. */
int piece_checksums(pagert_flash *flash, flash_piece *piece)
{
    uint64_t unit = piece->offset_bytes / flash->unit_bytes;
    for (uint32_t at = 0; at < piece->size_bytes; at += flash->unit_bytes, unit++) {
        uint32_t checksum = pagert_crc32c(0, piece->memory + at, flash->unit_bytes);
        if (piece->write) {
            flash->checksums[unit] = checksum;
        } else if (checksum != flash->checksums[unit]) {
            piece->failed_offset = piece->offset_bytes + at;
            if (piece->reread_count++)
                return -EBADMSG;
            piece->done_bytes = 0;
            piece->stall_count = 0;
            return PIECE_AGAIN;
        }
    }
    return 0;
}

/* After a write that failed nobody knows what its units hold. */
void piece_forget_checksums(pagert_flash *flash, uint64_t offset_bytes, uint64_t size_bytes)
{
    memset(flash->written + offset_bytes / flash->unit_bytes, 0, size_bytes / flash->unit_bytes);
}

/* Where in a range bytes were never written, or -1. */
int64_t piece_unwritten_offset(const pagert_flash *flash, uint64_t offset_bytes,
                               uint64_t size_bytes)
{
    const uint64_t unit = offset_bytes / flash->unit_bytes;
    const uint8_t *hole = memchr(flash->written + unit, 0, size_bytes / flash->unit_bytes);
    if (!hole)
        return -1;
    return (int64_t)((uint64_t)(hole - flash->written) * flash->unit_bytes);
}
