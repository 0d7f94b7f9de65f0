# SPDX-License-Identifier: Apache-2.0
"""Recording: turns what a pump notes down into the events of a trace.

While a recorder is set, the pump appends to a plain list: a list of (region, size_bytes, offset_bytes,
length_bytes, mode) for an operator, a pair (region, size_bytes) for a region that comes, and a number for one
that goes. We add None where an optimizer step ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from pagert._core.pump import OVERWRITE, READ, Pump
from pagert.errors import PagertError
from pagert.trace.trace import Access, Event, Operator, Release, Reserve, Step, Trace

__all__ = ["record"]


@contextlib.contextmanager
def record(pump: Pump, metadata: dict[str, Any]) -> Iterator[Trace]:
    """Record what is pinned, reserved and released inside; the trace is filled when the block ends."""
    if pump.recorder is not None:
        raise PagertError("this pager records a trace already; leave that trace() block first")
    trace = Trace(page_bytes=pump.page_bytes, metadata=metadata)
    noted: list[Any] = []
    hook = register_optimizer_step_post_hook(
        lambda *_: noted.append(None)
    )
    pump.recorder = noted
    try:
        yield trace
    finally:
        pump.recorder = None
        hook.remove()
        for event in events_of(noted, pump.page_bytes):
            trace.append(event)


def events_of(noted: Iterable[Any], page_bytes: int) -> Iterator[Event]:
    """Give regions their numbers and bytes their pages."""
    numbers: dict[int, int] = {}
    count = 0
    for note in noted:
        if note is None:
            yield Step()
        elif isinstance(note, int):
            # A region that no operator used while we recorded never appeared.
            if note in numbers:
                yield Release(numbers.pop(note))
        elif isinstance(note, tuple):
            region, size_bytes = note
            numbers[region] = count
            count += 1
            yield Reserve(numbers[region], -(-size_bytes // page_bytes))
        else:
            for region, size_bytes, *_ in note:
                if region not in numbers:
                    numbers[region] = count
                    count += 1
                    yield Reserve(numbers[region], -(-size_bytes // page_bytes), stored=True)
            yield Operator(
                tuple(
                    access
                    for region, *extent in note
                    for access in _pages(numbers[region], *extent, page_bytes=page_bytes)
                )
            )


def _pages(
    region: int, size_bytes: int, offset_bytes: int, length_bytes: int, mode: int, *, page_bytes: int
) -> Iterator[Access]:
    """Pages of a range of bytes. A page that an overwrite covers in part is updated."""
    end_bytes = offset_bytes + length_bytes
    first, end = offset_bytes // page_bytes, -(-end_bytes // page_bytes)
    if mode != OVERWRITE:
        yield Access(region, first, end - first, "r" if mode == READ else "w")
        return
    whole_first = -(-offset_bytes // page_bytes)
    # The region's end counts as a page's end.
    whole_end = end if end_bytes == size_bytes else end_bytes // page_bytes
    if whole_end <= whole_first:
        yield Access(region, first, end - first, "w")
        return
    if first < whole_first:
        yield Access(region, first, whole_first - first, "w")
    yield Access(region, whole_first, whole_end - whole_first, "o")
    if whole_end < end:
        yield Access(region, whole_end, end - whole_end, "w")
