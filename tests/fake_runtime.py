# SPDX-License-Identifier: Apache-2.0
"""A runtime in pure Python that evicts as much as it can, to find whoever keeps a stale view.

Each pin puts its windows at new random places of the arena. When it is released, every page is
copied out and its frames are poisoned with 0xFF. What is pinned only for reading is compared with
the bytes below: a write that was not announced is an error. Pages that an overwrite gave up come in
as poison.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy
import torch

from pagert.errors import ForeignTensor, OutOfFrames, PagerClosed

READ, UPDATE, OVERWRITE = range(3)
POISON = 0xFF


class FakeRegion:
    deferred = None

    def settle(self) -> None:
        pass

    def __init__(self, pump: FakePump, size_bytes: int) -> None:
        self.pump = pump
        self.size_bytes = size_bytes
        page_count = -(-size_bytes // pump.page_bytes)
        self.bytes = numpy.zeros(page_count * pump.page_bytes, numpy.uint8)
        self.written = numpy.zeros(page_count, bool)
        self.windows: list[FakeWindow] = []
        pump.live_regions += 1

    def __del__(self) -> None:
        self.pump.live_regions -= 1


class FakeWindow:
    """Pages [first, last) of a region at frame `frame`, held by `holds` pins."""

    def __init__(self, region: FakeRegion, first: int, last: int) -> None:
        self.region, self.first, self.last = region, first, last
        self.frame = -1
        self.holds = 0
        self.writable = numpy.zeros(last - first, bool)


class FakePin:
    def __init__(
        self, pump: FakePump, windows: list[FakeWindow], device_bytes: tuple[int, ...]
    ) -> None:
        self.pump, self.windows, self.device_bytes = pump, windows, device_bytes

    def release(self) -> None:
        windows, self.windows = self.windows, []
        for window in windows:
            self.pump.let_go(window)

    def __enter__(self) -> FakePin:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class FakePump:
    def __init__(self, page_bytes: int, frame_count: int, seed: int) -> None:
        self.page_bytes = page_bytes
        self.frame_count = frame_count
        self.arena = torch.full((page_bytes * frame_count,), POISON, dtype=torch.uint8)
        self.frames = self.arena.numpy()
        self.random = random.Random(seed)
        self.windows: list[FakeWindow] = []  # all held ones
        self.closed = False
        self.live_regions = 0
        self.pins = self.evictions = self.prefetches = 0
        self.fetched_bytes = 0
        self.recorded: list[list[tuple[int, int, int]]] | None = None

    def reserve(self, size_bytes: int) -> FakeRegion:
        self.check_open()
        assert size_bytes > 0
        return FakeRegion(self, size_bytes)

    def check_open(self) -> None:
        if self.closed:
            raise PagerClosed("the pager is closed")

    def pin(self, accesses) -> FakePin:
        self.check_open()
        self.pins += 1
        pages = []
        for region, offset, size, _ in accesses:
            if not isinstance(region, FakeRegion) or region.pump is not self:
                raise ForeignTensor("a region of another pump")
            assert size > 0
            assert offset >= 0
            assert offset + size <= region.size_bytes
            pages.append(
                (region, offset // self.page_bytes, -(-(offset + size) // self.page_bytes))
            )
        if self.recorded is not None:
            self.recorded.append([(offset, size, mode) for _, offset, size, mode in accesses])
        windows = [self.cover(region, first, last, pages) for region, first, last in pages]
        new = list({id(window): window for window in windows if window.holds == 0}.values())
        self.place(new)
        for window in new:
            self.fill(window, accesses)
        for window in windows:
            window.holds += 1
        for (region, offset, size, mode), window in zip(accesses, windows, strict=True):
            if mode != READ:
                first, last = offset // self.page_bytes, -(-(offset + size) // self.page_bytes)
                window.writable[first - window.first : last - window.first] = True
                region.written[first:last] = True
        starts = tuple(
            (window.frame - window.first) * self.page_bytes + offset
            for (_, offset, _, _), window in zip(accesses, windows, strict=True)
        )
        return FakePin(self, windows, starts)

    def cover(self, region, first, last, pages) -> FakeWindow:
        """Return the window of a range: one that is held, or a new one that joins what meets it."""
        for window in region.windows:
            if window.first <= first and last <= window.last:
                return window
        joined = True
        while joined:
            joined = False
            for other, start, end in pages:
                meets = other is region and start <= last and first <= end
                if meets and (start < first or end > last):
                    first, last, joined = min(first, start), max(last, end), True
        for window in region.windows:
            if window.holds and window.first < last and first < window.last:
                raise self.out_of_frames(last - first)  # a held window does not grow
            if window.first <= first and last <= window.last:
                return window
        window = FakeWindow(region, first, last)
        region.windows.append(window)
        return window

    def place(self, new: list[FakeWindow]) -> None:
        """Choose random places between the held windows."""
        self.random.shuffle(new)
        needed = sum(window.last - window.first for window in new)
        for attempt in range(20):
            taken = sorted((held.frame, held.last - held.first) for held in self.windows)
            placed = []
            spare = self.frame_count - sum(length for _, length in taken) - needed
            for window in new:
                length = window.last - window.first
                gaps, start = [], 0
                for frame, count in [*taken, (self.frame_count, 0)]:
                    if frame - start >= length:
                        gaps.append((start, frame - start - length))
                    start = frame + count
                if not gaps:
                    break
                start, slack = self.random.choice(gaps)
                slack = max(0, min(slack, spare)) if attempt < 10 else 0
                shift = self.random.randint(0, slack)
                spare -= shift
                window.frame = start + shift
                placed.append(window)
                taken = sorted([*taken, (window.frame, length)])
            if len(placed) == len(new):
                self.windows.extend(new)
                return
        for window in new:
            window.region.windows.remove(window)
        raise self.out_of_frames(needed)

    def out_of_frames(self, needed: int) -> OutOfFrames:
        error = OutOfFrames("no frames")
        error.needed_bytes = needed * self.page_bytes
        held = sum(window.last - window.first for window in self.windows)
        error.unpinned_bytes = (self.frame_count - held) * self.page_bytes
        error.capacity_bytes = self.frame_count * self.page_bytes
        return error

    def memory(self, window: FakeWindow) -> numpy.ndarray:
        start = window.frame * self.page_bytes
        return self.frames[start : start + (window.last - window.first) * self.page_bytes]

    def fill(self, window: FakeWindow, accesses) -> None:
        region, size = window.region, self.page_bytes
        fetched = numpy.ones(window.last - window.first, bool)
        for other, offset, length, mode in accesses:
            if other is region and mode == OVERWRITE:
                end = offset + length
                first = -(-offset // size)
                last = -(-end // size) if end == region.size_bytes else end // size
                inside = range(max(first, window.first), min(last, window.last))
                for page in inside:
                    fetched[page - window.first] = False
        frames = self.memory(window).reshape(-1, size)
        below = region.bytes[window.first * size : window.last * size].reshape(-1, size)
        frames[fetched] = below[fetched]
        frames[~fetched] = POISON
        self.fetched_bytes += int(fetched.sum()) * size

    def let_go(self, window: FakeWindow) -> None:
        window.holds -= 1
        if window.holds:
            return
        region, size = window.region, self.page_bytes
        frames = self.memory(window).reshape(-1, size)
        below = region.bytes[window.first * size : window.last * size].reshape(-1, size)
        clean = ~window.writable
        assert numpy.array_equal(frames[clean], below[clean]), (
            "a page that was pinned for reading changed"
        )
        below[window.writable] = frames[window.writable]
        frames[:] = POISON
        region.windows.remove(window)
        self.windows.remove(window)

    def prefetch(self, region: FakeRegion, offset: int, size: int) -> None:
        self.check_open()
        self.prefetches += 1

    def evict(self, region: FakeRegion, offset: int, size: int) -> None:
        self.check_open()
        self.evictions += 1

    def flush(self) -> None:
        self.check_open()

    def locate(self, region: FakeRegion, offset: int, size: int) -> tuple[int, int, int, int]:
        self.check_open()
        first, last = offset // self.page_bytes, -(-(offset + size) // self.page_bytes)
        device = sum(
            min(last, window.last) - max(first, window.first)
            for window in region.windows
            if window.first < last and first < window.last
        )
        written = int(region.written[first:last].sum())
        return last - first - written, device, written - device, 0

    def check_idle(self) -> None:
        assert not self.windows, "a pin was left"
        assert (self.frames == POISON).all(), "bytes were written outside of a pinned window"


class FakeRuntime:
    """The interface of `pagert.runtime.Runtime` over a FakePump."""

    defer_updates = False

    def __init__(
        self, *, device_bytes: int = 1 << 20, page_bytes: int = 4096, seed: int = 0
    ) -> None:
        self.page_bytes = page_bytes
        self.pump = FakePump(page_bytes, device_bytes // page_bytes, seed)
        self.storage = self.pump.arena.untyped_storage()
        self.device = torch.device("cpu")
        self.flat: dict[torch.dtype, torch.Tensor] = {}
        self.config = SimpleNamespace(page_bytes=page_bytes, device_bytes=device_bytes)

    @property
    def closed(self) -> bool:
        return self.pump.closed

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace()

    def reset_stats(self) -> None:
        pass

    def flush(self) -> None:
        self.pump.flush()

    def settle(self) -> bool:
        return False

    def close(self) -> None:
        self.pump.closed = True

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise PagerClosed(f"{what}: the pager is closed")

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
