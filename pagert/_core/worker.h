/* SPDX-License-Identifier: Apache-2.0
 *
 * What every engine with threads of its own needs: a thread that takes no signal, and an event
 * descriptor that says 'something is finished'.
 */
#ifndef PAGERT_WORKER_H
#define PAGERT_WORKER_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Start a thread with all signals blocked: Ctrl-C and the like belong to the caller's threads.
 * 0 or -errno. `name` has at most 15 characters. */
static inline int pagert_worker_start(pthread_t *thread, void *(*run)(void *), void *context,
                                      const char *name)
{
    sigset_t all, before;
    sigfillset(&all);
    int error = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (error)
        return -error;
    error = pthread_create(thread, NULL, run, context);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return -error;
    (void)pthread_setname_np(*thread, name);
    return 0;
}

static inline int pagert_event_open(void)
{
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return fd < 0 ? -errno : fd;
}

/* Both calls can only fail with EAGAIN (the counter is full, or empty already), which changes
 * nothing. */
static inline void pagert_event_signal(int event_fd)
{
    uint64_t one = 1;
    while (write(event_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static inline void pagert_event_drain(int event_fd)
{
    uint64_t count;
    while (read(event_fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

#endif
