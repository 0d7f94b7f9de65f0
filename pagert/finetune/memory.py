# SPDX-License-Identifier: Apache-2.0
"""Memory of this process: how the C library hands it back, and how much there was at most.

Operators' results come and go in each step. With glibc's defaults its threshold for own mappings grows to
32 MiB as they are freed, they move into the heap, and their holes stay resident: aligned requests, as PyTorch's
are, do not fit a hole of their own size. With what autograd saves in pages those holes are most of a process, and
grow with the batch. So the threshold stays where glibc begins: a larger tensor has a mapping of its own, which is gone
when it is freed. It costs a fault for each OS page.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = [
    "keep_heap_small",
    "offer_to_kernel_first",
    "peak_rss_bytes",
    "return_free_memory",
]

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_THRESHOLD_BYTES = 2**17  # glibc's own, which stays as it is once it was set
_ARENA_COUNT = 2


def keep_heap_small() -> bool:
    """Make the C library return large freed tensors to the kernel at once. False: it cannot be told."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return all(
        mallopt(option, value)
        for option, value in (
            (_M_MMAP_THRESHOLD, _THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, _THRESHOLD_BYTES),
            (_M_ARENA_MAX, _ARENA_COUNT),
        )
    )


def return_free_memory() -> None:
    """Give free heap memory back to the kernel, after a phase that used much of it."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def peak_rss_bytes() -> int:
    """Largest resident set of this program so far, file mappings included.

    `ru_maxrss` would not do for the unpaged run: a child inherits it from the process that started
    it.
    """
    for line in (
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM line")


def offer_to_kernel_first(process_id: int) -> None:
    """Let the kernel end this process of ours, rather than another, when memory runs out."""
    Path(f"/proc/{process_id}/oom_score_adj").write_text("1000", encoding="ascii")
