/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of libflash and how they fit.
 *
 *   flash.c        opens, closes, and chooses the backend
 *   flash_file.c   the private file: no name, direct I/O or not, alignment, space
 *   requests.c     takes requests, cuts them into pieces, gives them back, on the caller's thread
 *   piece.c        what a system call's result means for a piece; its checksums
 *   uring.c        backend: pieces through a kernel ring
 *   thread_pool.c  backend: pieces by threads with pread and pwrite
 *   crc32c.c       checksums
 *
 * A request lies in an entry while the engine has it. An entry is cut into pieces of at most
 * piece_bytes, and a piece is what one system call (or one ring submission) moves. A piece covers
 * whole checksum units.
 */
#ifndef PAGERT_FLASH_INTERNAL_H
#define PAGERT_FLASH_INTERNAL_H

#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "pagert/flash.h"

/* The system calls that the data passes through. The tests put a faulty kernel here; all others get
 * pagert_flash_kernel. Each returns as the system call does: -1 with errno, or the result. */
typedef struct flash_system {
    ssize_t (*pread)(int fd, void *target, size_t size_bytes, off_t offset_bytes);
    ssize_t (*pwrite)(int fd, const void *source, size_t size_bytes, off_t offset_bytes);
    int (*ring_setup)(unsigned entry_count, void *parameters);
    void *(*ring_map)(size_t size_bytes, int fd, off_t offset_bytes);
    void (*ring_unmap)(void *address, size_t size_bytes);
    int (*ring_enter)(int fd, unsigned submit_count, unsigned complete_count, unsigned flags);
    int (*ring_register_event)(int fd, int event_fd);
    int (*ring_close)(int fd);
} flash_system;
extern const flash_system pagert_flash_kernel;

/* What was opened, and what it asks for. */
typedef struct flash_file {
    int fd;
    uint64_t capacity_bytes, free_bytes, file_system;
    uint32_t memory_alignment, offset_alignment;
    uint32_t direct, reserved;
    int32_t direct_errno;
} flash_file;

typedef struct flash_entry {
    pagert_request *request;
    struct flash_entry *next;
    uint64_t cut_bytes;     /* bytes handed out as pieces; the whole size once a piece has failed */
    uint64_t failed_offset; /* the lowest that failed */
    uint32_t piece_count;   /* pieces not yet finished */
    int32_t result;
} flash_entry;

typedef struct flash_piece {
    flash_entry *entry;
    uint8_t *memory;
    uint64_t offset_bytes;
    uint64_t failed_offset;
    struct flash_piece *next; /* of the one list that it is on, by stage */
    struct iovec vector;      /* must stay in place while the kernel has the piece */
    uint32_t size_bytes, done_bytes;
    uint32_t generation; /* told to the kernel: a completion of an earlier attempt is recognised */
    int32_t result;
    uint16_t stall_count; /* attempts in a row that moved nothing */
    uint8_t reread_count;
    uint8_t write;
    uint8_t in_kernel; /* ring only: submitted or queued, not completed */
    uint8_t moved;     /* every byte is where it belongs */
    uint8_t summed;    /* checksums are stored (write) or match (read) */
} flash_piece;

typedef struct piece_list {
    flash_piece *first, *last;
} piece_list;

typedef struct flash_ring flash_ring;
typedef struct flash_pool flash_pool;

struct pagert_flash {
    const flash_system *system;
    flash_file file;
    flash_ring *ring; /* one of the two is there */
    flash_pool *pool;
    int event_fd;
    pid_t pid; /* a forked child shares the descriptors and the file, and must leave both alone */

    uint32_t block_bytes;
    uint32_t piece_bytes;
    uint32_t unit_bytes; /* bytes under one checksum; divides block_bytes and piece_bytes */
    uint32_t depth;      /* most pieces in the backend at once */
    uint32_t entry_count, piece_count;

    /* One of each for every unit. `written` is 1 where the checksum is valid. A unit belongs to the
     * piece that covers it, so threads never meet here. */
    uint32_t *checksums;
    uint8_t *written;

    /* The caller's thread alone uses what follows.
     * pieces: free + in the backend + (ring only) waiting for their checksum == piece_count */
    flash_entry *entries, *free_entries;
    flash_entry *waiting_first, *waiting_last; /* not cut to the end; at most the first is begun */
    flash_piece *pieces;
    piece_list free_pieces;
    piece_list unsummed; /* ring only: checksums to compute or verify */
    pagert_request *finished_first, *finished_last;
    uint32_t backend_count; /* pieces in the backend, at most depth */
};

/* flash_file.c */
int flash_file_open(const flash_system *system, const pagert_flash_options *options,
                    flash_file *file);
int flash_file_probe(const flash_system *system, int fd, uint32_t size_bytes,
                     uint32_t memory_alignment);

/* flash.c */
int pagert_flash_open_on(const flash_system *system, const pagert_flash_options *options,
                         pagert_flash **flash, pagert_flash_info *info);

/* requests.c */
int flash_submit(void *context, pagert_request *request);
int flash_flush(void *context);
int flash_reap(void *context, pagert_request **finished, int max);
void flash_finish_piece(pagert_flash *flash, flash_piece *piece, int32_t result);

/* piece.c */
enum { PIECE_AGAIN = 1 }; /* beside 0: done, and -errno: failed */
int piece_advance(const pagert_flash *flash, flash_piece *piece, int64_t moved);
int piece_checksums(pagert_flash *flash, flash_piece *piece);
void piece_forget_checksums(pagert_flash *flash, uint64_t offset_bytes, uint64_t size_bytes);
int64_t piece_unwritten_offset(const pagert_flash *flash, uint64_t offset_bytes,
                               uint64_t size_bytes);
void piece_push(piece_list *list, flash_piece *piece);
flash_piece *piece_pop(piece_list *list);

/* uring.c: 0 or -errno. The ring takes pieces with queue(), tells the kernel with enter(). */
int flash_ring_open(pagert_flash *flash, flash_ring **ring);
void flash_ring_queue(pagert_flash *flash, flash_piece *piece);
void flash_ring_enter(pagert_flash *flash);
void flash_ring_harvest(pagert_flash *flash);
void flash_ring_close(pagert_flash *flash); /* waits for what the kernel still has */

/* thread_pool.c */
int flash_pool_open(pagert_flash *flash, flash_pool **pool);
void flash_pool_queue(pagert_flash *flash, flash_piece *piece);
void flash_pool_harvest(pagert_flash *flash);
void flash_pool_close(pagert_flash *flash);  /* waits for the pieces that threads work on */
void flash_pool_forget(pagert_flash *flash); /* in a forked child, where the threads do not exist */

/* crc32c.c: one way by name, for the tests. -EOPNOTSUPP where the processor lacks it. */
enum { CRC32C_PORTABLE, CRC32C_INSTRUCTION, CRC32C_FOLDING, CRC32C_WAY_COUNT };
int pagert_crc32c_by(unsigned way, uint32_t seed, const void *bytes, uint64_t size_bytes,
                     uint32_t *checksum);

#endif
