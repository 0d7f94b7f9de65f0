# SPDX-License-Identifier: Apache-2.0
"""Optimum and LRU by the book, for traces so small that everything can be tried.

A trace here is a list of operators, each a dict of pages and modes, or a page that is released.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

Plain = list  # of (page, mode) or lists of such pairs, as pagert.simulate takes it
State = tuple[tuple[int, bool], ...]  # resident pages, and whether each is dirty


def operators(trace: Plain) -> Iterator[tuple[dict[int, str], list[int]]]:
    """Of each element: what is needed together, and what is released then."""
    for element in trace:
        pairs = [element] if isinstance(element, tuple) else element
        needed: dict[int, str] = {}
        for page, mode in pairs:
            if mode != "f":
                needed[page] = mode if needed.get(page, mode) == mode else "w"
        yield needed, [page for page, mode in pairs if mode == "f"]


def least_moved(
    trace: Plain, capacity: int, stored_first: bool = False, discard: bool = True
) -> int:
    """Fewest pages fetched and written: every set of pages is thrown out before every operator."""
    return _least(trace, capacity, stored_first, count_faults=False, discard=discard)


def least_faults(trace: Plain, capacity: int) -> int:
    """Fewest faults, whatever is written."""
    return _least(trace, capacity, False, count_faults=True)


def _least(
    trace: Plain, capacity: int, stored_first: bool, count_faults: bool, discard: bool = True
) -> int:
    pages = {page for needed, _ in operators(trace) for page in needed}
    below = frozenset(pages) if stored_first else frozenset()
    # Of each state (resident pages with their dirt, valid copies below): what it costs to get there.
    costs: dict[tuple[State, frozenset[int]], int] = {((), below): 0}
    elements = list(operators(trace))
    for position, (needed, released) in enumerate(elements):
        dead = {page for page in pages if discard and _is_dead(page, elements[position:])}
        reached: dict[tuple[State, frozenset[int]], int] = {}
        for (resident, stored), cost in costs.items():
            free_to_go = [page for page, _ in resident if page not in needed]
            for count in range(len(free_to_go) + 1):
                for leaving in itertools.combinations(free_to_go, count):
                    after = _after(dict(resident), stored, leaving, needed, released, capacity, dead)
                    if after is None:
                        continue
                    state, moved, faults = after
                    total = cost + (faults if count_faults else moved)
                    reached[state] = min(total, reached.get(state, total))
        costs = reached
    return min(costs.values())


def _is_dead(page: int, coming: list[tuple[dict[int, str], list[int]]]) -> bool:
    """Whether the page's bytes are never read again: thrown away, they are not missed."""
    for needed, released in coming:
        if page in needed:
            return needed[page] == "o"
        if page in released:
            return True
    return True


def _after(
    resident: dict[int, bool], stored: frozenset[int], leaving: tuple[int, ...],
    needed: dict[int, str], released: list[int], capacity: int, dead: set[int],
) -> tuple[tuple[State, frozenset[int]], int, int] | None:  # fmt: skip
    below = set(stored)
    moved = faults = 0
    for page in leaving:
        if resident.pop(page) and page not in dead:
            moved += 1
            below.add(page)
    for page, mode in needed.items():
        if page not in resident:
            faults += 1
            moved += page in below and mode != "o"
            resident[page] = False
        if mode != "r":
            resident[page] = True
            below.discard(page)
    if len(resident) > capacity:
        return None
    for page in released:
        resident.pop(page, None)
        below.discard(page)
    return (tuple(sorted(resident.items())), frozenset(below)), moved, faults


def lru(trace: Plain, capacity: int) -> tuple[int, int, int, int]:
    """Hits, faults, fetched and written pages of least recently used."""
    resident: collections.OrderedDict[int, bool] = collections.OrderedDict()
    stored: set[int] = set()
    hits = faults = fetched = written = 0
    for needed, released in operators(trace):
        absent = [page for page in needed if page not in resident]
        hits += len(needed) - len(absent)
        faults += len(absent)
        fetched += sum(page in stored and needed[page] != "o" for page in absent)
        while len(resident) + len(absent) > capacity:
            victim = next(page for page in resident if page not in needed)
            if resident.pop(victim):
                written += 1
                stored.add(victim)
        for page, mode in needed.items():
            resident[page] = resident.get(page, False) or mode != "r"
            resident.move_to_end(page)
            if mode != "r":
                stored.discard(page)
        for page in released:
            resident.pop(page, None)
            stored.discard(page)
    return hits, faults, fetched, written
