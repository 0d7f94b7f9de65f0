/* SPDX-License-Identifier: Apache-2.0
 *
 * The host engine: threads that fill and copy memory. Requests are served in the order they came; a
 * large one is cut, so that all threads work on it at once.
 *
 * A request lies in an entry while the engine has it. An entry is on `free`, or on `waiting` while
 * bytes of it are not handed out, or with the threads that do its last pieces. Everything is under
 * one lock, which is held for the handing out of a piece, never while bytes move.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "../worker.h"
#include "pagert/copy.h"

enum {
    ENTRY_COUNT = 1024,
    LARGEST_PIECE = 1 << 20, /* bytes; at some 10 GB/s a lock every 100 microseconds */
    SMALLEST_PIECE = 128 << 10,
    LARGEST_THREAD_COUNT = 256,
};

typedef struct copy_entry {
    pagert_request *request;
    struct copy_entry *next;
    uint64_t cut_bytes;
    uint64_t piece_bytes;
    uint32_t piece_count; /* handed out, not done */
} copy_entry;

struct pagert_copy {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    copy_entry *free, *waiting_first, *waiting_last;
    pagert_request *finished_first, *finished_last;
    int stop;
    int event_fd;
    pid_t pid; /* a forked child has none of the threads */
    uint32_t thread_count;
    pthread_t *threads;
    copy_entry entries[ENTRY_COUNT];
};

static void move_bytes(const pagert_request *request, uint64_t offset_bytes, uint64_t size_bytes)
{
    uint8_t *target = (uint8_t *)request->target + offset_bytes;
    if (request->kind == PAGERT_REQUEST_FILL)
        memset(target, 0, size_bytes);
    else
        memcpy(target, (const uint8_t *)request->source + offset_bytes, size_bytes);
}

/* Under the lock. The descriptor is readable whenever something is finished. */
static void give_back(pagert_copy *copy, pagert_request *request, int32_t result)
{
    request->result = result;
    request->next = NULL;
    if (copy->finished_first) {
        copy->finished_last->next = request;
    } else {
        copy->finished_first = request;
        pagert_event_signal(copy->event_fd);
    }
    copy->finished_last = request;
}

static uint64_t choose_piece_bytes(const pagert_copy *copy, uint64_t size_bytes)
{
    uint64_t piece_bytes = (size_bytes / copy->thread_count + 4095) & ~(uint64_t)4095;
    if (piece_bytes < SMALLEST_PIECE)
        piece_bytes = SMALLEST_PIECE;
    return piece_bytes < LARGEST_PIECE ? piece_bytes : LARGEST_PIECE;
}

/* Under the lock, which is let go of while bytes move. */
static void do_piece(pagert_copy *copy)
{
    copy_entry *entry = copy->waiting_first;
    pagert_request *request = entry->request;
    const uint64_t offset_bytes = entry->cut_bytes;
    uint64_t size_bytes = request->size_bytes - offset_bytes;
    if (size_bytes > entry->piece_bytes)
        size_bytes = entry->piece_bytes;
    entry->cut_bytes += size_bytes;
    entry->piece_count++;
    if (entry->cut_bytes == request->size_bytes)
        copy->waiting_first = entry->next;

    pthread_mutex_unlock(&copy->lock);
    move_bytes(request, offset_bytes, size_bytes);
    pthread_mutex_lock(&copy->lock);

    if (--entry->piece_count == 0 && entry->cut_bytes == request->size_bytes) {
        entry->next = copy->free;
        copy->free = entry;
        give_back(copy, request, 0);
    }
}

static void *work(void *context)
{
    pagert_copy *copy = context;
    pthread_mutex_lock(&copy->lock);
    for (;;) {
        while (!copy->stop && !copy->waiting_first)
            pthread_cond_wait(&copy->wake, &copy->lock);
        if (!copy->waiting_first)
            break;
        do_piece(copy);
    }
    pthread_mutex_unlock(&copy->lock);
    return NULL;
}

static int take(pagert_copy *copy, pagert_request *request)
{
    const int known = request->kind == PAGERT_REQUEST_FILL || request->kind == PAGERT_REQUEST_COPY;
    if (!known || request->size_bytes == 0) {
        give_back(copy, request, known ? 0 : -EINVAL);
        return 0;
    }
    copy_entry *entry = copy->free;
    if (!entry)
        return -EAGAIN;
    copy->free = entry->next;
    *entry = (copy_entry){.request = request,
                          .piece_bytes = choose_piece_bytes(copy, request->size_bytes)};
    if (copy->waiting_first)
        copy->waiting_last->next = entry;
    else
        copy->waiting_first = entry;
    copy->waiting_last = entry;
    if (request->size_bytes > entry->piece_bytes)
        pthread_cond_broadcast(&copy->wake);
    else
        pthread_cond_signal(&copy->wake);
    return 0;
}

static int submit(void *context, pagert_request *request)
{
    pagert_copy *copy = context;
    if (copy->pid != getpid())
        return -EPERM;
    pthread_mutex_lock(&copy->lock);
    const int code = take(copy, request);
    pthread_mutex_unlock(&copy->lock);
    return code;
}

static int flush(void *context)
{
    const pagert_copy *copy = context;
    return copy->pid == getpid() ? 0 : -EPERM; /* threads start as soon as they are given work */
}

static int reap(void *context, pagert_request **finished, int max)
{
    pagert_copy *copy = context;
    if (copy->pid != getpid())
        return -EPERM;
    int count = 0;
    pthread_mutex_lock(&copy->lock);
    pagert_event_drain(copy->event_fd);
    while (count < max && copy->finished_first) {
        finished[count] = copy->finished_first;
        copy->finished_first = copy->finished_first->next;
        finished[count++]->next = NULL;
    }
    if (copy->finished_first)
        pagert_event_signal(copy->event_fd);
    pthread_mutex_unlock(&copy->lock);
    return count;
}

int pagert_copy_open(uint32_t thread_count, pagert_copy **opened)
{
    if (thread_count == 0 || thread_count > LARGEST_THREAD_COUNT)
        return -EINVAL;
    pagert_copy *copy = calloc(1, sizeof *copy);
    if (!copy)
        return -ENOMEM;
    copy->pid = getpid();
    pthread_mutex_init(&copy->lock, NULL);
    pthread_cond_init(&copy->wake, NULL);
    for (int i = 0; i < ENTRY_COUNT; i++) {
        copy->entries[i].next = copy->free;
        copy->free = &copy->entries[i];
    }
    int code = 0;
    copy->event_fd = pagert_event_open();
    if (copy->event_fd < 0)
        code = copy->event_fd;
    copy->threads = calloc(thread_count, sizeof *copy->threads);
    if (!code && !copy->threads)
        code = -ENOMEM;
    while (!code && copy->thread_count < thread_count) {
        code = pagert_worker_start(&copy->threads[copy->thread_count], work, copy, "pagert-copy");
        if (!code)
            copy->thread_count++;
    }
    if (copy->thread_count) /* fewer threads than asked for are slower, not wrong */
        code = 0;
    if (code) {
        pagert_copy_close(copy);
        return code;
    }
    *opened = copy;
    return 0;
}

pagert_engine pagert_copy_engine(pagert_copy *copy)
{
    return (pagert_engine){.context = copy,
                           .event_fd = copy->event_fd,
                           .submit = submit,
                           .flush = flush,
                           .reap = reap};
}

void pagert_copy_close(pagert_copy *copy)
{
    if (copy->pid == getpid()) {
        pthread_mutex_lock(&copy->lock);
        copy->stop = 1;
        pthread_mutex_unlock(&copy->lock);
        pthread_cond_broadcast(&copy->wake);
        for (uint32_t i = 0; i < copy->thread_count; i++)
            pthread_join(copy->threads[i], NULL);
        pthread_cond_destroy(&copy->wake);
        pthread_mutex_destroy(&copy->lock);
    }
    free(copy->threads);
    if (copy->event_fd >= 0)
        (void)close(copy->event_fd);
    free(copy);
}
