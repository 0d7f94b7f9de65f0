/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening and closing: the file, the memory for checksums, entries and pieces, and the backend. All
 * memory is taken here; requests allocate nothing.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../worker.h"
#include "internal.h"

enum {
    SMALLEST_BLOCK = 4096,
    /* Measured with bench/flash.py --sweep on a virtual disk that reads 3.7 and writes 8 GB/s, as
     * parts of the best plain loop in the same run (read, write): 32 x 4 MiB 1.11, 0.98; 32 x 1
     * MiB 1.00, 0.78; 16 x 1 MiB 0.90, 0.65; 64 x 4 MiB 1.03, 1.03. That disk finishes all that is
     * queued before it says so: the more bytes in flight, the rarer the pause. Where pages of 256
     * KiB cannot be joined the number counts: 32 of them 0.81, 0.49; 128 of them 0.91, 0.75 (on a
     * quieter machine 0.84, 0.81 and 0.89, 0.85). The pump limits the bytes. The kernel cuts pieces
     * to what the device takes. Threads gain nothing from more than 16. */
    DEFAULT_DEPTH = 128,
    DEFAULT_THREAD_COUNT = 16,
    DEFAULT_REQUEST_BYTES = 4 << 20,
    LARGEST_DEPTH = 4096,
    LARGEST_THREAD_COUNT = 256,
    LARGEST_REQUEST_BYTES = 1 << 30, /* one system call moves at most 2 GiB - 4 KiB */
};

static void *map_zeroed(uint64_t size_bytes)
{
    void *memory = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static int invalid(const pagert_flash_options *options)
{
    return !options->folder || !options->block_bytes || options->block_bytes % SMALLEST_BLOCK ||
           !options->capacity_bytes || options->capacity_bytes % options->block_bytes ||
           options->capacity_bytes > INT64_MAX || options->depth > LARGEST_DEPTH ||
           options->request_bytes > LARGEST_REQUEST_BYTES ||
           options->backend > PAGERT_BACKEND_THREADS || options->direct > PAGERT_DIRECT_OFF;
}

/* The largest size within request_bytes that cuts blocks into equal pieces or joins whole ones. */
static uint32_t choose_piece_bytes(uint32_t block_bytes, uint32_t request_bytes, uint32_t alignment)
{
    if (request_bytes >= block_bytes)
        return request_bytes - request_bytes % block_bytes;
    if (alignment < SMALLEST_BLOCK)
        alignment = SMALLEST_BLOCK;
    for (uint32_t parts = 2; block_bytes / parts >= alignment; parts++)
        if (block_bytes % parts == 0 && block_bytes / parts % alignment == 0 &&
            block_bytes / parts <= request_bytes)
            return block_bytes / parts;
    return alignment;
}

static int take_memory(pagert_flash *flash)
{
    const uint64_t unit_count = flash->file.capacity_bytes / flash->unit_bytes;
    flash->checksums = map_zeroed(unit_count * sizeof *flash->checksums);
    flash->written = map_zeroed(unit_count);
    flash->entries = calloc(flash->entry_count, sizeof *flash->entries);
    flash->pieces = calloc(flash->piece_count, sizeof *flash->pieces);
    if (!flash->checksums || !flash->written || !flash->entries || !flash->pieces)
        return -ENOMEM;
    for (uint32_t i = 0; i < flash->entry_count; i++) {
        flash->entries[i].next = flash->free_entries;
        flash->free_entries = &flash->entries[i];
    }
    for (uint32_t i = 0; i < flash->piece_count; i++)
        piece_push(&flash->free_pieces, &flash->pieces[i]);
    return 0;
}

/* AUTO: a ring for direct I/O. Buffered I/O is a copy by the processor, which a ring would do on
 * the caller's thread. */
static int choose_backend(pagert_flash *flash, const pagert_flash_options *options,
                          pagert_flash_info *info)
{
    const uint32_t wanted = options->backend;
    int code = -EOPNOTSUPP;
    const int ring =
        wanted == PAGERT_BACKEND_IO_URING || (wanted == PAGERT_BACKEND_AUTO && flash->file.direct);
    if (ring) {
        code = flash_ring_open(flash, &flash->ring);
        info->uring_errno = -code;
    }
    if (code && wanted != PAGERT_BACKEND_IO_URING) {
        if (!options->depth)
            flash->depth = DEFAULT_THREAD_COUNT;
        if (flash->depth > LARGEST_THREAD_COUNT)
            flash->depth = LARGEST_THREAD_COUNT;
        code = flash_pool_open(flash, &flash->pool);
    }
    info->backend = flash->ring ? PAGERT_BACKEND_IO_URING : PAGERT_BACKEND_THREADS;
    return code;
}

static void tell_file(const flash_file *file, pagert_flash_info *info)
{
    info->capacity_bytes = file->capacity_bytes;
    info->free_bytes = file->free_bytes;
    info->direct = file->direct;
    info->memory_alignment = file->memory_alignment;
    info->offset_alignment = file->offset_alignment;
    info->reserved = file->reserved;
    info->direct_errno = file->direct_errno;
    info->file_system = file->file_system;
}

int pagert_flash_open_on(const flash_system *system, const pagert_flash_options *options,
                         pagert_flash **opened, pagert_flash_info *info)
{
    *info = (pagert_flash_info){0};
    if (invalid(options))
        return -EINVAL;
    pagert_flash *flash = calloc(1, sizeof *flash);
    if (!flash)
        return -ENOMEM;
    flash->system = system;
    flash->pid = getpid();
    flash->file.fd = -1;
    flash->event_fd = pagert_event_open();
    int code = flash->event_fd < 0 ? flash->event_fd : 0;
    if (code)
        goto failed;
    code = flash_file_open(system, options, &flash->file);
    tell_file(&flash->file, info);
    if (code)
        goto failed;

    const uint32_t request_bytes =
        options->request_bytes ? options->request_bytes : DEFAULT_REQUEST_BYTES;
    flash->depth = options->depth ? options->depth : DEFAULT_DEPTH;
    flash->block_bytes = options->block_bytes;
    flash->piece_bytes =
        choose_piece_bytes(options->block_bytes, request_bytes, flash->file.offset_alignment);
    flash->unit_bytes =
        flash->piece_bytes < flash->block_bytes ? flash->piece_bytes : flash->block_bytes;
    /* Twice depth: as many again may wait for their checksums while the device goes on. */
    flash->piece_count = 2 * flash->depth;
    flash->entry_count = 2 * flash->depth > 64 ? 2 * flash->depth : 64;
    code = take_memory(flash);
    if (!code)
        code = choose_backend(flash, options, info);
    if (code)
        goto failed;
    info->block_bytes = flash->block_bytes;
    info->depth = flash->depth;
    info->request_bytes = flash->piece_bytes;
    *opened = flash;
    return 0;

failed:
    pagert_flash_close(flash);
    return code;
}

int pagert_flash_open(const pagert_flash_options *options, pagert_flash **flash,
                      pagert_flash_info *info)
{
    return pagert_flash_open_on(&pagert_flash_kernel, options, flash, info);
}

pagert_engine pagert_flash_engine(pagert_flash *flash)
{
    return (pagert_engine){.context = flash,
                           .event_fd = flash->event_fd,
                           .submit = flash_submit,
                           .flush = flash_flush,
                           .reap = flash_reap};
}

void pagert_flash_close(pagert_flash *flash)
{
    if (flash->ring)
        flash_ring_close(flash);
    if (flash->pool && flash->pid == getpid())
        flash_pool_close(flash);
    else if (flash->pool)
        flash_pool_forget(flash);
    const uint64_t unit_count =
        flash->unit_bytes ? flash->file.capacity_bytes / flash->unit_bytes : 0;
    if (flash->checksums)
        (void)munmap(flash->checksums, unit_count * sizeof *flash->checksums);
    if (flash->written)
        (void)munmap(flash->written, unit_count);
    free(flash->entries);
    free(flash->pieces);
    if (flash->file.fd >= 0)
        (void)close(flash->file.fd);
    if (flash->event_fd >= 0)
        (void)close(flash->event_fd);
    free(flash);
}
