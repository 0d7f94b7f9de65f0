/* SPDX-License-Identifier: Apache-2.0
 *
 * The border between the pump and whatever moves bytes. An engine knows addresses and sizes, not
 * pages or tensors. It may own threads and memory; it never calls back, and never touches a request
 * after it gave it back through reap().
 */
#ifndef PAGERT_ENGINE_H
#define PAGERT_ENGINE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PAGERT_REQUEST_FILL,  /* target[0, size) = 0 */
    PAGERT_REQUEST_COPY,  /* target[0, size) = source[0, size); the ranges do not overlap */
    PAGERT_REQUEST_READ,  /* target[0, size) = file[offset, offset + size) */
    PAGERT_REQUEST_WRITE, /* file[offset, offset + size) = source[0, size) */
};

/* Owned by the caller; the engine's between submit() and reap(). */
typedef struct pagert_request {
    uint32_t kind;
    int32_t result;        /* out: 0, or -errno. Every byte was moved if and only if it is 0 */
    void *target;          /* FILL, COPY, READ */
    const void *source;    /* COPY, WRITE */
    uint64_t offset_bytes; /* READ, WRITE */
    uint64_t size_bytes;
    uint64_t failed_offset; /* out, READ and WRITE with result < 0: where in the file */
    void *tag;              /* the caller's */
    struct pagert_request *next; /* the engine's while it has the request */
} pagert_request;

typedef struct pagert_engine {
    void *context;
    int event_fd; /* becomes readable when reap() may have something; reap() drains it */

    /* Take a request. 0; -EAGAIN: the queue is full, reap first. Never blocks on the device. Every
     * request that was taken comes back through reap() exactly once, failed or not. */
    int (*submit)(void *context, pagert_request *request);

    /* Let requests taken so far start, if the engine batches. 0 or -errno. */
    int (*flush)(void *context);

    /* Give back up to `max` finished requests, in any order; how many, or -errno where the engine
     * cannot be used (in a forked child: -EPERM). Never blocks; may have work of its own to do, so
     * call it whenever the event descriptor is readable. */
    int (*reap)(void *context, pagert_request **finished, int max);
} pagert_engine;

#ifdef __cplusplus
}
#endif
#endif
