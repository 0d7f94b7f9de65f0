# SPDX-License-Identifier: Apache-2.0
"""A trace as the gaps between the uses of its pages: what the offline optimum is computed from.

Pages that are used alike are one group. An operator's number is its time. Between two uses of a group lies a
gap: its pages are kept on the device, or leave and come back. What leaving costs:

- a fetch, where the next use reads and the page has bytes (it was written, or stored from the start);
- a writeback, where it is dirty and its bytes are read again; or wherever it is dirty, for whoever may not throw
  dirty pages away. Pages written once and evicted in several gaps before they are written again cost one
  writeback only: those gaps are of one epoch, which begins with the write.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagert.trace import Operator, Release, Reserve, Trace

__all__ = ["Epoch", "Gap", "Uses", "read_uses"]

_Pattern = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Gap:
    """Pages between two uses, at `start` and `end`, or between the last one and their release."""

    start: int
    end: int
    page_count: int
    fetches: bool
    released: bool = False  # `end` is no use, but the operator before which they are released

    @property
    def spans(self) -> bool:
        """Whether any operator runs in between: else keeping the pages is free."""
        return self.end - self.start > 1


@dataclass(frozen=True)
class Epoch:
    """Gaps in which pages lie unchanged; `dirty`: the first one that leaves is written back.

    Only gaps that cost something when pages leave, and span an operator.
    """

    page_count: int
    gaps: tuple[int, ...]  # numbers of gaps
    dirty: bool


@dataclass(frozen=True)
class Uses:
    """All gaps of a trace, and what is needed at each operator."""

    needed: np.ndarray  # pages of each operator
    gaps: list[Gap]
    epochs: list[Epoch]
    first_fetches: np.ndarray  # pages that each operator must fetch whatever happened before
    first_uses: np.ndarray  # pages that each operator is the first to use


def read_uses(trace: Trace, discard: bool = True) -> Uses:
    """Group the pages of a trace, and find their gaps; `discard`: dirty pages may be thrown away."""
    needed = np.array(
        [
            sum(access.page_count for access in event.accesses)
            for event in trace
            if type(event) is Operator
        ],
        dtype=np.int64,
    )
    uses = Uses(needed, [], [], np.zeros_like(needed), np.zeros_like(needed))
    for (stored, released, pattern), page_count in _groups(trace).items():
        _add_gaps(uses, pattern, page_count, stored, None if discard else released)
    return uses


def _groups(trace: Trace) -> dict[tuple[bool, int, _Pattern], int]:
    """Number of pages of each pattern of use: stored at first, when released, and how used."""
    groups: dict[tuple[bool, int, _Pattern], int] = {}
    live: dict[int, tuple[int, bool]] = {}
    ranges: dict[int, list[tuple[int, int, int, str]]] = {}

    def close(region: int) -> None:
        _, stored = live.pop(region)
        for pattern, page_count in _segments(ranges.pop(region, [])):
            key = stored, time, pattern
            groups[key] = groups.get(key, 0) + page_count

    time = 0
    for event in trace:
        if type(event) is Operator:
            for region, first, count, mode in event.accesses:
                ranges.setdefault(region, []).append((first, first + count, time, mode))
            time += 1
        elif type(event) is Reserve:
            live[event.region] = event.page_count, event.stored
        elif type(event) is Release:
            close(event.region)
    for region in list(live):
        close(region)
    return groups


def _segments(ranges: list[tuple[int, int, int, str]]) -> Iterator[tuple[_Pattern, int]]:
    """Cut a region where its accesses begin and end; the pattern of each part."""
    if len({(first, end) for first, end, _, _ in ranges}) == 1:  # as nearly all are
        yield tuple((time, mode) for _, _, time, mode in ranges), ranges[0][1] - ranges[0][0]
        return
    bounds = sorted({r[0] for r in ranges} | {r[1] for r in ranges})
    position = {bound: index for index, bound in enumerate(bounds)}
    patterns: list[list[tuple[int, str]]] = [[] for _ in bounds]
    for first, end, time, mode in ranges:
        for index in range(position[first], position[end]):
            patterns[index].append((time, mode))
    for index, pattern in enumerate(patterns):
        if pattern:
            yield tuple(pattern), bounds[index + 1] - bounds[index]


def _add_gaps(
    uses: Uses, pattern: _Pattern, page_count: int, stored: bool, written_until: int | None
) -> None:
    """Add the gaps of one group. With `written_until`, dirty pages that leave before are always written."""
    first_time, first_mode = pattern[0]
    uses.first_uses[first_time] += page_count
    if stored and first_mode != "o":
        uses.first_fetches[first_time] += page_count
    has_bytes, dirty = stored, False
    epoch: list[int] = []
    for (start, mode), (end, next_mode) in itertools.pairwise(pattern):
        if mode != "r":
            has_bytes = dirty = True
        gap = Gap(start, end, page_count, has_bytes and next_mode != "o")
        uses.gaps.append(gap)
        if gap.spans and (gap.fetches or (dirty and written_until is not None)):
            epoch.append(len(uses.gaps) - 1)
        if next_mode != "r":
            if epoch:
                uses.epochs.append(Epoch(page_count, tuple(epoch), dirty))
            epoch = []
    last_time, last_mode = pattern[-1]
    dirty |= last_mode != "r"
    if written_until is not None and dirty and written_until - last_time > 1:
        uses.gaps.append(Gap(last_time, written_until, page_count, fetches=False, released=True))
        epoch.append(len(uses.gaps) - 1)
    if epoch:
        uses.epochs.append(Epoch(page_count, tuple(epoch), dirty))
