# SPDX-License-Identifier: Apache-2.0
"""The lookahead policy: on what repeats it evicts as Belady would, and learns that by itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagert._core import core as c

PAGE_BYTES = 4096


class Run:
    """A core on the device and flash that carries transfers out at once."""

    def __init__(self, page_count: int, device_frames: int, policy: str) -> None:
        self.core = c.Core(
            page_bytes=PAGE_BYTES,
            page_count=2 * page_count + 16,
            device_frames=device_frames,
            host_frames=0,
            flash_frames=2 * page_count + 16,
            transfer_pages_max=4,
            policy=policy,
        )

    def carry_out(self) -> None:
        while (transfer := self.core.next_transfer()) is not None:
            self.core.complete(transfer, 0)

    def use(self, *accesses) -> None:
        pin = self.core.pin(list(accesses))
        while not pin.poll():
            self.carry_out()
        pin.release()

    def written_pages(self, count: int) -> list:
        """Reserve regions of one page, write each, and leave them clean on flash."""
        regions = [self.core.reserve(PAGE_BYTES) for _ in range(count)]
        for region in regions:
            self.use((region, 0, PAGE_BYTES, c.OVERWRITE))
        for region in regions:
            while self.core.evict(region, 0, PAGE_BYTES):
                self.carry_out()
        return regions

    @property
    def fetched(self) -> int:
        return self.core.counters().transferred[c.FLASH_TO_DEVICE]

    @property
    def written(self) -> int:
        return self.core.counters().transferred[c.DEVICE_TO_FLASH]


def fewest_misses(resident: set[int], trace: list[int], count: int, capacity: int) -> int:
    """Belady's rule from a given start: misses among the first `count` accesses of the trace."""
    resident, misses = set(resident), 0
    for now in range(count):
        page = trace[now]
        if page in resident:
            continue
        misses += 1
        if len(resident) >= capacity:
            rest = trace[now + 1 :]
            resident.remove(max(resident, key=lambda p: rest.index(p) if p in rest else len(trace)))
        resident.add(page)
    return misses


@given(
    period=st.lists(st.integers(0, 11), min_size=2, max_size=40),
    device_frames=st.integers(1, 10),
)
def test_misses_on_what_repeats_equal_belady(period, device_frames):
    run = Run(12, device_frames, "lookahead")
    regions = run.written_pages(12)
    # Choices that are not LRU's are paid for by a tenth of what LRU moves: with so few pages that takes a while.
    warm, counted = 150, 6
    for page in period * warm:
        run.use((regions[page], 0, PAGE_BYTES, c.READ))
    resident = {page for page in range(12) if run.core.page(regions[page][0]).frame[0] != c.NONE}
    before = run.fetched
    for page in period * counted:
        run.use((regions[page], 0, PAGE_BYTES, c.READ))
    trace = period * (counted + 4)
    best = fewest_misses(resident, trace, len(period) * counted, device_frames)
    assert run.fetched - before == best


def train(run: Run, layers: int, pages: int, steps: int) -> list[tuple[int, int]]:
    """Forward, backward with new gradients, and an optimizer with two states; pages moved per step."""
    size = pages * PAGE_BYTES
    weights, first, second = ([run.core.reserve(size) for _ in range(layers)] for _ in range(3))
    for region in (*weights, *first, *second):
        run.use((region, 0, size, c.OVERWRITE))
    moved = []
    for _ in range(steps):
        before = run.fetched, run.written
        for region in weights:
            run.use((region, 0, size, c.READ))
        gradients = {}
        for layer in reversed(range(layers)):
            run.use((weights[layer], 0, size, c.READ))
            gradients[layer] = run.core.reserve(size)
            run.use((gradients[layer], 0, size, c.OVERWRITE))
        for layer in range(layers):
            run.use(
                (weights[layer], 0, size, c.UPDATE),
                (gradients[layer], 0, size, c.READ),
                (first[layer], 0, size, c.UPDATE),
                (second[layer], 0, size, c.UPDATE),
            )
        for region in gradients.values():
            run.core.release(region)
        moved.append((run.fetched - before[0], run.written - before[1]))
        assert run.core.check() == 0
    return moved


@pytest.mark.parametrize("device_frames", [48, 72, 96])
def test_a_training_step_moves_less_than_with_lru(device_frames):
    """Gradients are new regions in each step, known by their position in it."""
    moved = {
        policy: train(Run(400, device_frames, policy), layers=8, pages=5, steps=10)[-1]
        for policy in ("lru", "lookahead")
    }
    assert sum(moved["lookahead"]) < sum(moved["lru"])


def test_what_never_repeats_is_evicted_as_by_lru():
    chance = random.Random(7)
    runs = {policy: Run(40, 10, policy) for policy in ("lru", "lookahead")}
    pages = {policy: run.written_pages(40) for policy, run in runs.items()}
    for _ in range(1500):
        # Ranges of every kind, so that no four accesses in a row are seen twice.
        page, offset = chance.randrange(40), chance.randrange(PAGE_BYTES - 1)
        mode = chance.choice([c.READ, c.UPDATE])
        for policy, run in runs.items():
            run.use((pages[policy][page], offset, 1, mode))
    assert runs["lookahead"].fetched <= 1.1 * runs["lru"].fetched


def test_pages_to_come_are_fetched_before_they_are_asked_for():
    """After some rounds nothing is a fault any more, although one third of the pages fits."""
    run = Run(30, 10, "lookahead")
    regions = run.written_pages(30)
    for _ in range(8):
        before = run.core.counters().faults
        for region in regions:
            run.use((region, 0, PAGE_BYTES, c.READ))
            run.core.look_ahead(4)
            run.carry_out()
        faults = run.core.counters().faults - before
    assert faults <= 3
