# SPDX-License-Identifier: Apache-2.0
"""Counts of the policies on fixed traces: against an independent LRU, and frozen."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from pagert._core import core as c

PAGE_BYTES = 4096
Trace = list[list[tuple[int, int]]]  # of each operator, the pages it needs together and their modes


class Counts(NamedTuple):
    hits: int
    faults: int
    fetched: int
    written: int


def lru(trace: Trace, capacity: int) -> Counts:
    """Least recently used, by the book. Zero pages are neither fetched nor written."""
    resident: collections.OrderedDict[int, bool] = collections.OrderedDict()
    stored: set[int] = set()
    hits = faults = fetched = written = 0
    for operator in trace:
        needed = {page for page, _ in operator}
        for page, mode in operator:
            if page in resident:
                hits += 1
            else:
                faults += 1
                fetched += page in stored and mode != c.OVERWRITE
                if len(resident) == capacity:
                    victim = next(old for old in resident if old not in needed)
                    if resident.pop(victim):
                        written += 1
                        stored.add(victim)
            resident[page] = resident.get(page, False) or mode != c.READ
            resident.move_to_end(page)
            if mode != c.READ:
                stored.discard(page)
    return Counts(hits, faults, fetched, written)


def run_core(trace: Trace, capacity: int) -> Counts:
    """The same trace on the core, each page a region of its own, so that windows do not matter."""
    page_count = 1 + max(page for operator in trace for page, _ in operator)
    core = c.Core(
        page_bytes=PAGE_BYTES,
        page_count=page_count,
        device_frames=capacity,
        flash_frames=page_count,
    )
    regions = [core.reserve(PAGE_BYTES) for _ in range(page_count)]
    for operator in trace:
        pin = core.pin([(regions[page], 0, PAGE_BYTES, mode) for page, mode in operator])
        while (transfer := core.next_transfer()) is not None:
            core.complete(transfer)
        assert pin.poll()
        pin.release()
    assert core.check() == 0
    counters = core.counters()
    return Counts(
        counters.hits,
        counters.faults,
        counters.transferred[c.FLASH_TO_DEVICE],
        counters.transferred[c.DEVICE_TO_FLASH],
    )


def numbers(seed: int) -> Iterator[float]:
    """A linear congruential generator of our own (Knuth's MMIX constants): the same for ever."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield (state >> 11) / 2**53


def written_first(page_count: int) -> Trace:
    return [[(page, c.OVERWRITE)] for page in range(page_count)]


def cyclic() -> Trace:
    """Forward passes over frozen weights, a little larger than the device."""
    return written_first(20) + [[(page, c.READ)] for _ in range(10) for page in range(20)]


def scan() -> Trace:
    """A hot set, with a long scan in between each time."""
    trace = written_first(100)
    for start in range(0, 90, 10):
        trace += [[(page, c.READ)] for _ in range(3) for page in range(8)]
        trace += [[(page, c.UPDATE)] for page in range(start + 10, start + 20)]
    return trace


def zipf() -> Trace:
    """20000 accesses to 200 pages, popular as 1/rank; three in ten are updates."""
    weights = [1 / rank for rank in range(1, 201)]
    bounds = []
    total = 0.0
    for weight in weights:
        total += weight
        bounds.append(total)
    draw = numbers(42)
    trace: Trace = []
    for _ in range(20000):
        point = next(draw) * total
        page = next(index for index, bound in enumerate(bounds) if point < bound)
        trace.append([(page, c.UPDATE if next(draw) < 0.3 else c.READ)])
    return trace


def training() -> Trace:
    """Six steps of eight layers: forward, backward, and Adam over gradient, moments and weight."""
    layers = 8
    weight, gradient, first, second, activation = (
        [layers * kind + layer for layer in range(layers)] for kind in range(5)
    )
    trace: Trace = [[(page, c.OVERWRITE)] for page in weight]
    for _ in range(6):
        for layer in range(layers):
            operator = [(weight[layer], c.READ), (activation[layer], c.OVERWRITE)]
            if layer:
                operator.insert(0, (activation[layer - 1], c.READ))
            trace.append(operator)
        for layer in reversed(range(layers)):
            trace.append(
                [
                    (activation[layer], c.READ),
                    (weight[layer], c.READ),
                    (gradient[layer], c.OVERWRITE),
                ]
            )
        for layer in range(layers):
            trace.append(
                [
                    (gradient[layer], c.READ),
                    (first[layer], c.UPDATE),
                    (second[layer], c.UPDATE),
                    (weight[layer], c.UPDATE),
                ]
            )
    return trace


FROZEN = [
    (cyclic(), 19, Counts(0, 220, 200, 20)),
    (cyclic(), 20, Counts(200, 20, 0, 0)),
    (scan(), 12, Counts(144, 262, 162, 180)),
    (scan(), 20, Counts(208, 198, 98, 178)),
    (scan(), 64, Counts(208, 198, 98, 134)),
    (zipf(), 10, Counts(6423, 13577, 12925, 4830)),
    (zipf(), 40, Counts(12285, 7715, 7132, 3030)),
    (zipf(), 150, Counts(18542, 1458, 1135, 770)),
    (training(), 6, Counts(84, 398, 278, 243)),
    (training(), 12, Counts(131, 351, 231, 239)),
    (training(), 24, Counts(241, 241, 131, 212)),
    (training(), 39, Counts(392, 90, 40, 51)),
]


@pytest.mark.parametrize(("trace", "capacity", "frozen"), FROZEN)
def test_lru_counts_equal_an_independent_lru_and_never_change(
    trace: Trace, capacity: int, frozen: Counts
) -> None:
    assert lru(trace, capacity) == frozen
    assert run_core(trace, capacity) == frozen
