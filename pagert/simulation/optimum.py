# SPDX-License-Identifier: Apache-2.0
"""The offline optimum: the fewest pages fetched and written by any policy that knows the whole trace.

At every operator the pages that it needs, and those kept over the gaps that span it, fit the device. A page is
kept over a whole gap or not at all: to leave later or come back earlier takes more room and saves nothing. So
the question is how many pages of each group to keep over each gap. Where all gaps are worth the same, the gap
that ends last gives way (Belady), which is exact. Where they are not, it is an integer program: an interval
scheduling problem, written as a flow of free frames from operator to operator, with one variable more for each
epoch, since a dirty page that leaves several times is written once. (With writebacks the problem is NP-hard:
Beckmann, Gibbons, Haeupler, McGuffey, "Writeback-aware caching", 2020.) What remains free goes to gaps that cost
nothing, which saves faults.

A policy that runs may not throw dirty pages away, since it does not know but only expects that they are overwritten
or released next. `discard=False` is the optimum for such policies.

It shares no code with the core, and is never more than what a policy of the core can reach: no window need be
contiguous here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from pagert.simulation.counts import Counts
from pagert.simulation.program import shares_a_write, solve
from pagert.simulation.uses import Gap, Uses, read_uses
from pagert.trace import Operator, Step, Trace

__all__ = ["find_optimum"]


def find_optimum(
    trace: Trace, capacity_pages: int, host_pages: int, discard: bool = True
) -> tuple[list[Counts], int]:
    """Find the counts of each step, and a proven lower bound on what the device moves in sum."""
    uses = read_uses(trace, discard)
    step_of, step_count = _steps(trace)
    device, bound = _moved(uses, capacity_pages, step_of, step_count)
    flash = device
    if host_pages:
        # Pages on the device or the host: whatever flash moves, the two together cannot move less.
        flash, _ = _moved(uses, capacity_pages + host_pages, step_of, step_count)
    return [
        Counts(
            hits=int(hits),
            faults=int(faults),
            fetched_pages=int(fetched),
            written_pages=int(written),
            flash_read_pages=int(read),
            flash_written_pages=int(wrote),
        )
        for (hits, faults, fetched, written), (_, _, read, wrote) in zip(device.T, flash.T)
    ], bound


def _moved(
    uses: Uses, capacity_pages: int, step_of: np.ndarray, step_count: int
) -> tuple[np.ndarray, int]:
    """Hits, faults, fetched and written pages of each step; the lower bound."""
    room = capacity_pages - uses.needed
    kept, bound = _keep(uses, room)
    faults, fetched = uses.first_uses.copy(), uses.first_fetches.copy()
    written = np.zeros_like(faults)
    for gap, kept_pages in zip(uses.gaps, kept):
        if gap.released:
            continue
        faults[gap.end] += gap.page_count - kept_pages
        fetched[gap.end] += (gap.page_count - kept_pages) * gap.fetches
    for epoch in uses.epochs:
        if epoch.dirty:
            least = epoch.page_count
            for number in epoch.gaps:  # one page after the other leaves for the first time
                if kept[number] < least:
                    written[uses.gaps[number].start] += least - kept[number]
                    least = kept[number]
    rows = (uses.needed - faults, faults, fetched, written)
    return np.array([np.bincount(step_of, row, step_count) for row in rows], dtype=np.int64), (
        int(uses.first_fetches.sum()) + bound
    )


def _steps(trace: Trace) -> tuple[np.ndarray, int]:
    """The step of each operator."""
    steps, step = [], 0
    for event in trace:
        if type(event) is Operator:
            steps.append(step)
        elif type(event) is Step:
            step += 1
    unfinished = not steps or steps[-1] == step or step == 0
    return np.array(steps, dtype=np.int64), step + unfinished


def _keep(uses: Uses, room: np.ndarray) -> tuple[list[int], int]:
    """How many pages to keep over each gap; a lower bound on the pages moved because of the rest."""
    kept = [gap.page_count if not gap.spans else 0 for gap in uses.gaps]
    costly = [number for epoch in uses.epochs for number in epoch.gaps]
    bound = 0
    if costly:
        weights = _weights(uses)
        if len(set(weights.values())) == 1 and not any(shares_a_write(e) for e in uses.epochs):
            chosen = keep_nearest([uses.gaps[number] for number in costly], room)
            left = sum(uses.gaps[number].page_count for number in costly) - sum(chosen)
            bound = weights[costly[0]] * left
        else:
            chosen, bound = solve(uses, [(number, weights[number]) for number in costly], room)
        room = room - occupied([uses.gaps[n] for n in costly], chosen, len(room))
        for number, pages in zip(costly, chosen):
            kept[number] = pages
    decided = set(costly)
    free = [n for n, gap in enumerate(uses.gaps) if gap.spans and n not in decided]
    for number, pages in zip(free, keep_nearest([uses.gaps[n] for n in free], room)):
        kept[number] = pages
    return kept, bound


def _weights(uses: Uses) -> dict[int, int]:
    """What each costly gap costs for every page that leaves, but for writes that gaps share."""
    return {
        number: uses.gaps[number].fetches + (epoch.dirty and not shares_a_write(epoch))
        for epoch in uses.epochs
        for number in epoch.gaps
    }


def keep_nearest(gaps: Sequence[Gap], room: np.ndarray) -> list[int]:
    """Keep as many pages as fit, all worth the same: those whose next use is furthest give way."""
    kept = [gap.page_count for gap in gaps]
    starting: dict[int, list[int]] = {}
    ending: dict[int, list[int]] = {}
    for number, gap in enumerate(gaps):
        starting.setdefault(gap.start + 1, []).append(number)
        ending.setdefault(gap.end, []).append(number)
    furthest: list[tuple[int, int]] = []
    held = 0
    for time in sorted(starting.keys() | ending.keys() | set(range(len(room)))):
        for number in ending.get(time, ()):
            held -= kept[number]
        for number in starting.get(time, ()):
            heapq.heappush(furthest, (-gaps[number].end, number))
            held += kept[number]
        while time < len(room) and held > room[time]:
            number = furthest[0][1]
            leaving = min(kept[number], held - int(room[time]))
            kept[number] -= leaving
            held -= leaving
            if not kept[number]:
                heapq.heappop(furthest)
    return kept


def occupied(gaps: Sequence[Gap], kept: Sequence[int], operator_count: int) -> np.ndarray:
    """Pages that are kept over gaps, at each operator."""
    change = np.zeros(operator_count + 1, dtype=np.int64)
    for gap, pages in zip(gaps, kept):
        change[gap.start + 1] += pages
        change[gap.end] -= pages
    return np.cumsum(change)[:-1]
