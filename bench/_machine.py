# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine that a benchmark ran on, and memory laid out as the arenas are."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

__all__ = ["HugeMemory", "machine_facts", "spread"]

HUGE_PAGE = 2 << 20


class HugeMemory:
    """Anonymous memory at a 2 MiB boundary, in huge pages where there are any, faulted in."""

    def __init__(self, size_bytes: int) -> None:
        # Private: shared anonymous memory is a file in RAM, with rules of its own for huge pages.
        self._map = mmap.mmap(
            -1, size_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        first = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(first)
        offset = -self._address % HUGE_PAGE
        del first
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(self._map)
        self.view = whole[offset : offset + size_bytes]
        pattern = os.urandom(1 << 20)
        for at in range(0, size_bytes, len(pattern)):
            self.view[at : at + len(pattern)] = pattern[: size_bytes - at]

    def huge_fraction(self) -> float:
        """How much of it the kernel really backs with huge pages."""
        inside = False
        for line in _read("/proc/self/smaps", "").splitlines():
            bounds = line.split(" ", 1)[0].split("-")
            if len(bounds) == 2:
                start, end = (int(bound, 16) for bound in bounds)
                inside = start <= self._address < end
            elif inside and line.startswith("AnonHugePages:"):
                return min(1.0, int(line.split()[1]) * 1024 / len(self.view))
        return 0.0

    def pieces(self, piece_bytes: int, total_bytes: int) -> list[tuple[int, memoryview]]:
        """(offset in the file, memory) for a walk over total_bytes, going round in this memory."""
        room = len(self.view) // piece_bytes * piece_bytes
        found = []
        for offset in range(0, total_bytes, piece_bytes):
            at = offset % room
            size = min(piece_bytes, total_bytes - offset)
            found.append((offset, self.view[at : at + size]))
        return found


def _read(path: str | Path, fallback: str = "unknown") -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return fallback


def _field(path: str, name: str) -> str:
    for line in _read(path, "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _file_system(folder: str) -> dict[str, str]:
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind = "unknown"
    for line in _read("/proc/self/mountinfo", "").splitlines():
        fields = line.split()
        if fields[2] == number:
            kind = fields[fields.index("-") + 1]
    facts = {"file_system": kind}
    block = Path(f"/sys/dev/block/{number}")
    queue = block / "queue"
    if not queue.is_dir():  # a partition: the queue belongs to the whole disk
        queue = block / ".." / "queue"
    if queue.is_dir():
        for name in ("rotational", "nr_requests", "max_segments", "max_sectors_kb", "scheduler"):
            facts[name] = _read(queue / name)
    return facts


def machine_facts(folder: str) -> dict[str, str]:
    """Return what figures depend on: processor, memory, kernel, the device under a folder."""
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
        **_file_system(folder),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
