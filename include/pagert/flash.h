/* SPDX-License-Identifier: Apache-2.0
 *
 * libflash: one private file on flash, read and written in blocks, many requests in flight.
 *
 * O_DIRECT through io_uring where the kernel lets us, else a pool of threads with pread and pwrite.
 * The file has no name (O_TMPFILE, or created exclusively and unlinked at once), so it is gone when
 * the process ends in any way. Every block that was written has a CRC32C in memory, verified when
 * the block is read.
 *
 * One thread at a time may call submit, flush and reap. Functions return 0 or -errno.
 */
#ifndef PAGERT_FLASH_H
#define PAGERT_FLASH_H

#include <stdint.h>

#include "pagert/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pagert_flash pagert_flash;

enum { PAGERT_BACKEND_AUTO, PAGERT_BACKEND_IO_URING, PAGERT_BACKEND_THREADS };
enum { PAGERT_DIRECT_AUTO, PAGERT_DIRECT_REQUIRE, PAGERT_DIRECT_OFF };

typedef struct pagert_flash_options {
    const char *folder;      /* where the file lives; must exist */
    uint64_t capacity_bytes; /* a multiple of block_bytes */
    uint32_t block_bytes;    /* checksum unit: offsets and sizes of requests are multiples of it */
    uint32_t depth;          /* pieces in flight at once, at most 4096; 0: a measured default */
    uint32_t request_bytes;  /* larger requests are split into such pieces; 0: a measured default */
    uint32_t backend;        /* PAGERT_BACKEND_*; AUTO: io_uring for direct I/O, else threads */
    uint32_t direct;         /* PAGERT_DIRECT_*; AUTO: direct where it works, else buffered */
    uint32_t reserve;        /* 1: allocate the space now, so that a full disk shows at once */
} pagert_flash_options;

/* What was found out when the file was opened. */
typedef struct pagert_flash_info {
    uint64_t capacity_bytes;
    uint64_t free_bytes; /* of the file system, before the file took its space */
    uint32_t block_bytes;
    uint32_t depth, request_bytes; /* as in use; submit() takes at least twice depth requests */
    uint32_t backend;              /* IO_URING or THREADS */
    uint32_t direct;               /* 1: O_DIRECT, proven by a real write and read */
    uint32_t memory_alignment, offset_alignment; /* bytes; what direct I/O asks for */
    uint32_t reserved;    /* 1: the space is allocated */
    int32_t uring_errno;  /* why io_uring is not used; 0 where it is, or was not asked for */
    int32_t direct_errno; /* why O_DIRECT is not used; 0 likewise */
    uint64_t file_system; /* f_type of statfs: tmpfs and the like lie in RAM */
} pagert_flash_info;

/* Open. -ENOSPC: less than capacity_bytes is free (info->free_bytes is set all the same). -EFBIG:
 * more than RLIMIT_FSIZE. -EINVAL: an option out of range. Otherwise what the system said, to the
 * folder, to the probe of direct I/O where it is required, or to io_uring where it is asked for. */
int pagert_flash_open(const pagert_flash_options *options, pagert_flash **flash,
                      pagert_flash_info *info);

/* The table of functions for the pump. A WRITE's source must not change until it is reaped. A READ
 * whose checksum does not match, read again once, ends with -EBADMSG; a block that was never
 * written, or whose last write failed, with -ENODATA. Requests that are not whole blocks within the
 * capacity, or whose memory is not aligned to memory_alignment, end with -EINVAL. The pieces of a
 * request move in any order, and after the first failure no more are started; failed_offset is the
 * lowest that failed.
 *
 * In a forked child every call returns -EPERM and touches nothing; close() frees the child's memory
 * only. */
pagert_engine pagert_flash_engine(pagert_flash *flash);

/* Wait for what is in flight, then close. Requests not yet reaped are dropped. */
void pagert_flash_close(pagert_flash *flash);

/* CRC32C (Castagnoli), hardware where the processor has it. `seed` is 0 or an earlier result. */
uint32_t pagert_crc32c(uint32_t seed, const void *bytes, uint64_t size_bytes);
int pagert_crc32c_is_hardware(void);

#ifdef __cplusplus
}
#endif
#endif
