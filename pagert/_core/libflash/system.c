/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel that libflash talks to, outside of the tests. io_uring has no wrappers in the C
 * library.
 */
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"
#include "uring_abi.h"

#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#define SYS_io_uring_register 427
#endif

static int ring_setup(unsigned entry_count, void *parameters)
{
    return (int)syscall(SYS_io_uring_setup, entry_count, parameters);
}

static void *ring_map(size_t size_bytes, int fd, off_t offset_bytes)
{
    void *address =
        mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset_bytes);
    return address == MAP_FAILED ? NULL : address;
}

static void ring_unmap(void *address, size_t size_bytes)
{
    (void)munmap(address, size_bytes);
}

static int ring_enter(int fd, unsigned submit_count, unsigned complete_count, unsigned flags)
{
    return (int)syscall(SYS_io_uring_enter, fd, submit_count, complete_count, flags, NULL, 0);
}

static int ring_register_event(int fd, int event_fd)
{
    return (int)syscall(SYS_io_uring_register, fd, RING_REGISTER_EVENT, &event_fd, 1);
}

const flash_system pagert_flash_kernel = {
    .pread = pread,
    .pwrite = pwrite,
    .ring_setup = ring_setup,
    .ring_map = ring_map,
    .ring_unmap = ring_unmap,
    .ring_enter = ring_enter,
    .ring_register_event = ring_register_event,
    .ring_close = close,
};
