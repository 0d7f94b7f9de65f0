/* SPDX-License-Identifier: Apache-2.0
 *
 * The private file: created without a name, readable by its owner alone, with direct I/O where a
 * real write and read prove that it works. Nothing of it is left when the last descriptor is
 * closed.
 */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "internal.h"

/* statx with the fields that tell the alignment, which the headers of older C libraries lack. */
enum { STATX_WORDS = 64, STATX_MEMORY_WORD = 0x98 / 4, STATX_OFFSET_WORD = 0x9c / 4 };
static const uint32_t statx_direct_bit = 0x2000;
#ifdef STATX_DIOALIGN
_Static_assert(STATX_DIOALIGN == 0x2000 && sizeof(struct statx) == 4 * STATX_WORDS, "statx");
_Static_assert(offsetof(struct statx, stx_dio_mem_align) == 4 * STATX_MEMORY_WORD, "statx");
_Static_assert(offsetof(struct statx, stx_dio_offset_align) == 4 * STATX_OFFSET_WORD, "statx");
#endif

enum { SMALLEST_BLOCK = 4096 };

/* A file that has a name for an instant only: for file systems without O_TMPFILE. */
static int create_named(int folder_fd)
{
    for (int attempt = 0; attempt < 16; attempt++) {
        uint64_t random[2];
        if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
            return -errno;
        char name[64];
        (void)snprintf(name, sizeof name, ".pagert-%016llx%016llx", (unsigned long long)random[0],
                       (unsigned long long)random[1]);
        int fd = openat(folder_fd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0 && errno == EEXIST)
            continue;
        if (fd < 0)
            return -errno;
        if (unlinkat(folder_fd, name, 0) < 0) {
            int code = -errno;
            close(fd);
            return code;
        }
        return fd;
    }
    return -EEXIST;
}

static int create_nameless(const char *folder)
{
    int folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_fd < 0)
        return -errno;
    /* O_EXCL: it cannot be given a name later either. */
    int fd = openat(folder_fd, ".", O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) {
        const int code = -errno;
        /* What kernels and file systems say that know no O_TMPFILE. */
        const int unknown =
            code == -EOPNOTSUPP || code == -EISDIR || code == -EINVAL || code == -ENOENT;
        fd = unknown ? create_named(folder_fd) : code;
    }
    close(folder_fd);
    return fd;
}

static int set_direct(int fd, int direct)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) < 0)
        return -errno;
    return 0;
}

/* Write a pattern, read it back from memory aligned as asked and not better. 0 or -errno. */
int flash_file_probe(const flash_system *system, int fd, uint32_t size_bytes,
                     uint32_t memory_alignment)
{
    /* Both lie at an odd multiple of memory_alignment. */
    const size_t twice = (size_t)2 * memory_alignment;
    const size_t stride = ((size_t)size_bytes + twice - 1) / twice * twice;
    uint8_t *memory;
    int code = -posix_memalign((void **)&memory, twice < 4096 ? 4096 : twice,
                               memory_alignment + stride + size_bytes);
    if (code)
        return code;
    uint8_t *source = memory + memory_alignment;
    uint8_t *target = source + stride;
    memset(target, 0, size_bytes);
    for (uint32_t i = 0; i < size_bytes; i++)
        source[i] = (uint8_t)(i * 7 + (i >> 8) + 1);
    ssize_t moved;
    do
        moved = system->pwrite(fd, source, size_bytes, (off_t)size_bytes);
    while (moved < 0 && (errno == EINTR || errno == EAGAIN));
    if (moved == (ssize_t)size_bytes)
        do
            moved = system->pread(fd, target, size_bytes, (off_t)size_bytes);
        while (moved < 0 && (errno == EINTR || errno == EAGAIN));
    if (moved < 0)
        code = -errno;
    else if (moved != (ssize_t)size_bytes || memcmp(source, target, size_bytes) != 0)
        code = -EIO;
    free(memory);
    return code;
}

/* What the file system says about alignment. 1: known. 0: it does not say. Else no direct I/O. */
static int ask_alignment(flash_file *file)
{
#ifdef SYS_statx
    uint32_t words[STATX_WORDS] = {0};
    if (syscall(SYS_statx, file->fd, "", AT_EMPTY_PATH, statx_direct_bit, words) == 0 &&
        (words[0] & statx_direct_bit)) {
        if (!words[STATX_OFFSET_WORD])
            return -EOPNOTSUPP;
        file->memory_alignment = words[STATX_MEMORY_WORD] > 16 ? words[STATX_MEMORY_WORD] : 16;
        file->offset_alignment = words[STATX_OFFSET_WORD];
        return 1;
    }
#endif
    return 0;
}

/* Switch the file to direct I/O. 0 or -errno, and then it is as before. */
static int make_direct(const flash_system *system, uint32_t block_bytes, flash_file *file)
{
    int code = set_direct(file->fd, 1);
    if (code)
        return code;
    code = ask_alignment(file);
    if (code == 1) {
        uint32_t size_bytes = file->offset_alignment;
        if (size_bytes < SMALLEST_BLOCK)
            size_bytes = SMALLEST_BLOCK;
        code = block_bytes % size_bytes
                   ? -EINVAL
                   : flash_file_probe(system, file->fd, size_bytes, file->memory_alignment);
    } else if (code == 0) {
        code = -EINVAL;
        for (uint32_t size_bytes = SMALLEST_BLOCK; code == -EINVAL && size_bytes <= 65536;
             size_bytes *= 4)
            if (block_bytes % size_bytes == 0) {
                file->memory_alignment = SMALLEST_BLOCK;
                file->offset_alignment = size_bytes;
                code = flash_file_probe(system, file->fd, size_bytes, SMALLEST_BLOCK);
            }
    }
    if (code)
        (void)set_direct(file->fd, 0);
    return code;
}

static int choose_direct(const flash_system *system, const pagert_flash_options *options,
                         flash_file *file)
{
    if (options->direct != PAGERT_DIRECT_OFF) {
        const int code = make_direct(system, options->block_bytes, file);
        if (code == 0) {
            file->direct = 1;
            return 0;
        }
        if (options->direct == PAGERT_DIRECT_REQUIRE || code == -ENOSPC || code == -EDQUOT)
            return code;
        file->direct_errno = -code;
    }
    file->memory_alignment = 1;
    file->offset_alignment = 1;
    return flash_file_probe(system, file->fd, SMALLEST_BLOCK, SMALLEST_BLOCK);
}

/* Give the file its size, and its space if asked to. */
static int take_space(const pagert_flash_options *options, flash_file *file)
{
    if (ftruncate(file->fd, 0) < 0)
        return -errno;
    if (file->free_bytes < file->capacity_bytes)
        return -ENOSPC;
    if (options->reserve) {
        int code;
        do
            code = fallocate(file->fd, 0, 0, (off_t)file->capacity_bytes) < 0 ? -errno : 0;
        while (code == -EINTR);
        if (code == 0)
            file->reserved = 1;
        else if (code != -EOPNOTSUPP && code != -ENOSYS)
            return code;
    }
    /* The full size from the start: file systems serialise writes that make a file longer. */
    return ftruncate(file->fd, (off_t)file->capacity_bytes) < 0 ? -errno : 0;
}

/* On failure nothing stays open; what was found out so far stays in `file`. */
int flash_file_open(const flash_system *system, const pagert_flash_options *options,
                    flash_file *file)
{
    *file = (flash_file){.fd = -1, .capacity_bytes = options->capacity_bytes};
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        options->capacity_bytes > limit.rlim_cur)
        return -EFBIG; /* going on would be answered with a signal that kills */

    file->fd = create_nameless(options->folder);
    if (file->fd < 0)
        return file->fd;
    int code = 0;
    struct statfs system_facts;
    if (fstatfs(file->fd, &system_facts) < 0) {
        code = -errno;
        goto failed;
    }
    file->file_system = (uint64_t)system_facts.f_type;
    file->free_bytes = (uint64_t)system_facts.f_bavail * (uint64_t)system_facts.f_bsize;
    code = choose_direct(system, options, file);
    if (!code)
        code = take_space(options, file);
    if (!code)
        return 0;
failed:
    close(file->fd);
    file->fd = -1;
    return code;
}
