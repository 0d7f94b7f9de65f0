/* SPDX-License-Identifier: Apache-2.0
 *
 * Pieces by threads with pread and pwrite: one thread for each piece in flight. A thread does
 * everything for its piece: retries, the rest of short transfers, checksums, one more read where
 * they do not match.
 *
 * A piece is on `queued`, with one thread, or on `done`. The event descriptor is signalled when
 * `done` stops being empty; the caller's thread empties it whole.
 */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "../worker.h"
#include "internal.h"

struct flash_pool {
    pagert_flash *flash;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    piece_list queued, done; /* under the lock, as is `stop` */
    int stop;
    uint32_t thread_count;
    pthread_t threads[];
};

static int move_piece(const pagert_flash *flash, flash_piece *piece)
{
    int verdict = PIECE_AGAIN;
    while (verdict == PIECE_AGAIN) {
        uint8_t *memory = piece->memory + piece->done_bytes;
        const size_t size_bytes = piece->size_bytes - piece->done_bytes;
        const off_t offset_bytes = (off_t)(piece->offset_bytes + piece->done_bytes);
        if (piece->stall_count)
            usleep(100u * piece->stall_count);
        const ssize_t moved =
            piece->write ? flash->system->pwrite(flash->file.fd, memory, size_bytes, offset_bytes)
                         : flash->system->pread(flash->file.fd, memory, size_bytes, offset_bytes);
        verdict = piece_advance(flash, piece, moved < 0 ? -errno : moved);
    }
    return verdict;
}

static void *work(void *context)
{
    flash_pool *pool = context;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stop && !pool->queued.first)
            pthread_cond_wait(&pool->wake, &pool->lock);
        if (pool->stop)
            break;
        flash_piece *piece = piece_pop(&pool->queued);
        pthread_mutex_unlock(&pool->lock);
        do {
            piece->result = move_piece(pool->flash, piece);
            if (!piece->result)
                piece->result = piece_checksums(pool->flash, piece);
        } while (piece->result == PIECE_AGAIN);
        pthread_mutex_lock(&pool->lock);
        const int was_empty = !pool->done.first;
        piece_push(&pool->done, piece);
        if (was_empty)
            pagert_event_signal(pool->flash->event_fd);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

void flash_pool_queue(pagert_flash *flash, flash_piece *piece)
{
    flash_pool *pool = flash->pool;
    pthread_mutex_lock(&pool->lock);
    piece_push(&pool->queued, piece);
    pthread_mutex_unlock(&pool->lock);
    pthread_cond_signal(&pool->wake);
}

void flash_pool_harvest(pagert_flash *flash)
{
    flash_pool *pool = flash->pool;
    pthread_mutex_lock(&pool->lock);
    piece_list done = pool->done;
    pool->done.first = NULL;
    pthread_mutex_unlock(&pool->lock);
    for (flash_piece *piece; (piece = piece_pop(&done));) {
        flash->backend_count--;
        flash_finish_piece(flash, piece, piece->result);
    }
}

static void stop_threads(flash_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->stop = 1;
    pthread_mutex_unlock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    for (uint32_t i = 0; i < pool->thread_count; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
}

int flash_pool_open(pagert_flash *flash, flash_pool **opened)
{
    flash_pool *pool = calloc(1, sizeof *pool + flash->depth * sizeof(pthread_t));
    if (!pool)
        return -ENOMEM;
    pool->flash = flash;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (; pool->thread_count < flash->depth; pool->thread_count++) {
        const int code =
            pagert_worker_start(&pool->threads[pool->thread_count], work, pool, "pagert-flash");
        if (code && pool->thread_count == 0) {
            stop_threads(pool);
            free(pool);
            return code;
        }
        if (code)
            break; /* fewer threads are slower, not wrong */
    }
    *opened = pool;
    return 0;
}

void flash_pool_close(pagert_flash *flash)
{
    stop_threads(flash->pool);
    free(flash->pool);
    flash->pool = NULL;
}

void flash_pool_forget(pagert_flash *flash)
{
    free(flash->pool);
    flash->pool = NULL;
}
