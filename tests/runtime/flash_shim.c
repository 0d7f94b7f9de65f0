/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded before the C library: the flash engine's pread and pwrite fail, hang or lie when a test says so.
 * Only I/O in whole pages is meddled with, and only after `flash_shim` was set.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PASS, WRITE_FAILS, READ_FAILS, READ_LIES, HANG };

atomic_int flash_shim;       /* which of these */
atomic_int flash_shim_errno; /* what a failure sets */
atomic_int flash_shim_calls; /* that were meddled with */

static int meddles(size_t size_bytes)
{
    if (size_bytes < 4096 || size_bytes % 4096 != 0)
        return PASS;
    struct timespec moment = {.tv_nsec = 1000000};
    int mode;
    for (int first = 1; (mode = atomic_load(&flash_shim)) == HANG; first = 0) {
        atomic_fetch_add(&flash_shim_calls, first);
        nanosleep(&moment, NULL);
    }
    return mode;
}

ssize_t pwrite(int fd, const void *source, size_t size_bytes, off_t offset_bytes)
{
    if (meddles(size_bytes) == WRITE_FAILS) {
        atomic_fetch_add(&flash_shim_calls, 1);
        errno = atomic_load(&flash_shim_errno);
        return -1;
    }
    return syscall(SYS_pwrite64, fd, source, size_bytes, offset_bytes);
}

ssize_t pread(int fd, void *target, size_t size_bytes, off_t offset_bytes)
{
    int mode = meddles(size_bytes);
    if (mode == READ_FAILS) {
        atomic_fetch_add(&flash_shim_calls, 1);
        errno = atomic_load(&flash_shim_errno);
        return -1;
    }
    ssize_t moved = syscall(SYS_pread64, fd, target, size_bytes, offset_bytes);
    if (mode == READ_LIES && moved > 0) {
        atomic_fetch_add(&flash_shim_calls, 1);
        ((unsigned char *)target)[moved / 2] ^= 1;
    }
    return moved;
}

ssize_t pwrite64(int, const void *, size_t, off_t) __attribute__((alias("pwrite")));
ssize_t pread64(int, void *, size_t, off_t) __attribute__((alias("pread")));
