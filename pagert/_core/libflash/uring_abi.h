/* SPDX-License-Identifier: Apache-2.0
 *
 * The little of the kernel's io_uring interface that is used here, as of Linux 5.1. Written out,
 * because the headers of the machine that builds are often older than the kernel that runs.
 */
#ifndef PAGERT_FLASH_URING_ABI_H
#define PAGERT_FLASH_URING_ABI_H

#include <stdint.h>

typedef struct ring_submission {
    uint8_t operation;
    uint8_t flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset_bytes;
    uint64_t address;
    uint32_t length; /* vectors, for readv and writev */
    uint32_t operation_flags;
    uint64_t user_data;
    uint64_t unused[3];
} ring_submission;

typedef struct ring_completion {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
} ring_completion;

typedef struct ring_submission_offsets {
    uint32_t head, tail, mask, entry_count, flags, dropped, array, reserved;
    uint64_t reserved_too;
} ring_submission_offsets;

typedef struct ring_completion_offsets {
    uint32_t head, tail, mask, entry_count, overflow, completions, flags, reserved;
    uint64_t reserved_too;
} ring_completion_offsets;

typedef struct ring_parameters {
    uint32_t submission_count, completion_count, flags, thread_cpu, thread_idle, features, pool_fd;
    uint32_t reserved[3];
    ring_submission_offsets submission;
    ring_completion_offsets completion;
} ring_parameters;

_Static_assert(sizeof(ring_submission) == 64, "as the kernel has it");
_Static_assert(sizeof(ring_completion) == 16, "as the kernel has it");
_Static_assert(sizeof(ring_parameters) == 120, "as the kernel has it");

enum {
    RING_READV = 1,
    RING_WRITEV = 2,
    RING_FLAG_ASYNC = 1 << 4, /* of a submission: may block, so it never completes with EAGAIN */
    RING_ENTER_WAIT = 1 << 0, /* of enter: wait for completions */
    RING_REGISTER_EVENT = 4,
    RING_MAP_SUBMISSIONS = 0, /* offsets for mmap */
    RING_MAP_COMPLETIONS = 0x8000000,
    RING_MAP_ENTRIES = 0x10000000,
};

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
_Static_assert(sizeof(ring_submission) == sizeof(struct io_uring_sqe), "as the kernel has it");
_Static_assert(sizeof(ring_parameters) == sizeof(struct io_uring_params), "as the kernel has it");
_Static_assert((int)RING_READV == IORING_OP_READV && (int)RING_WRITEV == IORING_OP_WRITEV,
               "likewise");
_Static_assert((int)RING_REGISTER_EVENT == IORING_REGISTER_EVENTFD, "likewise");
#endif
#endif

#endif
