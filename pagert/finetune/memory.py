# SPDX-License-Identifier: Apache-2.0
"""Memory of this process: how the C library hands it back, and how much there was at most.

Activations come and go in each step. With glibc's defaults its threshold for own mappings grows to
32 MiB as they are freed, they move into the heap, and holes in the heap keep several hundred MiB
resident. To give every tensor a mapping of its own costs a fault for each OS page, a fifth of a
small model's step. So tensors up to a few MiB live in the heap, and the holes that they leave are
given back a few times as the backward pass frees them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import nn

__all__ = [
    "give_back_in_backward",
    "keep_heap_small",
    "offer_to_kernel_first",
    "peak_rss_bytes",
    "return_free_memory",
]

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_THRESHOLD_BYTES = 4 * 2**20
_ARENA_COUNT = 2
_TIMES_IN_BACKWARD = 4


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


def give_back_in_backward(model: nn.Module) -> None:
    """Give free heap memory back to the kernel a few times in each backward pass of a model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained[:: max(1, len(trained) // _TIMES_IN_BACKWARD)]:
        parameter.register_post_accumulate_grad_hook(_give_back)


def _give_back(parameter: torch.Tensor) -> None:
    return_free_memory()


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
