# SPDX-License-Identifier: Apache-2.0
"""A trace in memory: typed events for whoever looks at it, packed columns for whoever keeps it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from operator import index as whole
from typing import Any, NamedTuple, Union

import numpy as np

from pagert.errors import TraceError
from pagert.trace import columns, file

__all__ = ["MODES", "Access", "Event", "Operator", "Release", "Reserve", "Step", "Trace"]

MODES = "rwo"
"""Modes of an access: read, update (read and written), overwrite (every byte is written)."""

RELEASED = "f"
"""In a plain sequence: the page is given up, its bytes are gone."""

PAGE_BYTES = 256 << 10


class Access(NamedTuple):
    """Neighbouring pages of one region, used in one way."""

    region: int
    first_page: int
    page_count: int
    mode: str


class Reserve(NamedTuple):
    """A region comes to be. Its pages are zero, or `stored`: they held bytes before the trace began."""

    region: int
    page_count: int
    stored: bool = False


class Release(NamedTuple):
    """A region goes; its bytes are needed no more."""

    region: int


class Operator(NamedTuple):
    """What one operator needs together. No page appears twice."""

    accesses: tuple[Access, ...]


class Step(NamedTuple):
    """The end of an optimizer step."""


Event = Union[Reserve, Release, Operator, Step]  # noqa: UP007 -- evaluated by Python 3.10 as well


class Trace:
    """A sequence of events: operators with the pages they need together, regions that come and go.

    Regions are numbered from 0 in the order in which they appear; pages are counted within their region.
    `Pager.trace()` records one, `Trace.from_accesses` makes one, and it can be built by `append`.
    Iteration gives the events in order, `len` counts them.

    Parameters
    ----------
    events : iterable of Reserve, Release, Operator or Step
        Appended in order.
    page_bytes : int
        Size of a page, a power of two.
    metadata : mapping, optional
        What is known about where the trace comes from: text, numbers, lists and mappings of them.

    Raises
    ------
    TraceError
        An event does not fit those before it: a region that does not exist, a page outside of it.

    Examples
    --------
    >>> from pagert.trace import Access, Operator, Reserve, Trace
    >>> trace = Trace([Reserve(0, 4), Operator((Access(0, 0, 4, "o"),))], page_bytes=4096)
    >>> len(trace), trace.page_uses
    (2, 4)
    """

    def __init__(
        self,
        events: Iterable[Event] = (),
        *,
        page_bytes: int = PAGE_BYTES,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        page_bytes = whole(page_bytes)
        if page_bytes < 1 or page_bytes & (page_bytes - 1):
            raise TraceError(f"page_bytes is {page_bytes}; a page's size is a power of two")
        self.page_bytes = page_bytes
        self.metadata = dict(metadata or {})
        self.operator_count = 0
        self.step_count = 0
        self.page_uses = 0
        self._columns = columns.Columns()
        self._region_pages: list[int] = []  # of every region so far
        self._live: set[int] = set()
        self._live_pages = 0
        self._peak_pages = 0
        self._largest_operator = (0, 0)
        for event in events:
            self.append(event)

    @classmethod
    def from_accesses(
        cls, accesses: Iterable[Any], *, page_bytes: int = PAGE_BYTES, stored: bool = False
    ) -> Trace:
        """Make a trace of a plain sequence of pages.

        Parameters
        ----------
        accesses : iterable
            Of `(page, mode)`: an operator that needs one page; or of lists of such pairs, which one
            operator needs together. The mode is "r" (read), "w" (update), "o" (overwrite) or "f":
            released once the operator is done. Pages are numbers from 0.
        page_bytes : int
            Size of a page.
        stored : bool
            Whether pages hold bytes before the trace begins, which their first use must fetch. Else
            they are zero pages until they are written, and again after a release.

        Raises
        ------
        TraceError
            An element is neither, a mode is unknown, a page is not a whole number from 0.
        """
        trace = cls(page_bytes=page_bytes)
        region_of: dict[int, int] = {}
        seen: set[int] = set()
        for position, element in enumerate(accesses):
            uses, released = _read_element(element, position)
            for page in uses:
                if page not in region_of:
                    region_of[page] = trace.region_count
                    trace.append(Reserve(trace.region_count, 1, stored and page not in seen))
                    seen.add(page)
            if uses:
                trace.append(
                    Operator(tuple(Access(region_of[p], 0, 1, mode) for p, mode in uses.items()))
                )
            for page in released:
                seen.add(page)
                if page in region_of:
                    trace.append(Release(region_of.pop(page)))
        return trace

    def append(self, event: Event) -> None:
        """Add an event. Accesses of one operator that share pages become disjoint ones."""
        if type(event) is Operator:
            self._append_operator(event)
        elif type(event) is Reserve:
            self._append_reserve(event)
        elif type(event) is Release:
            if event.region not in self._live:
                raise TraceError(f"region {event.region} is released, and does not exist")
            self._live.remove(event.region)
            self._live_pages -= self._region_pages[event.region]
            self._columns.append(columns.RELEASE, 0, event.region, 0, 0)
        elif type(event) is Step:
            self.step_count += 1
            self._columns.append(columns.STEP, 0, 0, 0, 0)
        else:
            raise TraceError(f"{event!r} is no event; there are Reserve, Release, Operator and Step")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, compressed. The file appears once it is whole.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        file.write(path, self.rows, self.page_bytes, self.metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace that `save` has written.

        Raises
        ------
        TraceError
            The file is not a trace, is of another version, truncated or damaged.
        OSError
            The file cannot be read.
        """
        packed, page_bytes, metadata = file.read(path)
        try:
            return cls(_unpack(packed), page_bytes=page_bytes, metadata=metadata)
        except TraceError as error:
            raise TraceError(f"{os.fspath(path)}: the trace contradicts itself: {error}") from None

    def __len__(self) -> int:
        return len(self._columns) - self._columns.access_count

    def __iter__(self) -> Iterator[Event]:
        return _unpack(self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return (
            self.page_bytes == other.page_bytes
            and self.metadata == other.metadata
            and bool(np.array_equal(self.rows, other.rows))
        )

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return (
            f"<Trace: {self.operator_count} operators, {self.page_uses} page uses, "
            f"{self.region_count} regions, {self.step_count} steps, pages of {self.page_bytes} bytes>"
        )

    @property
    def rows(self) -> np.ndarray:
        """The events as they are packed: see `pagert.trace.columns`. Do not change them."""
        return self._columns.packed()

    @property
    def region_count(self) -> int:
        """Regions that appear in the trace."""
        return len(self._region_pages)

    @property
    def region_pages(self) -> Sequence[int]:
        """Pages of each region."""
        return self._region_pages

    @property
    def peak_pages(self) -> int:
        """Pages of the regions that exist at once, at most; `stored` ones exist from the start."""
        return self._peak_pages

    @property
    def largest_operator(self) -> tuple[int, int]:
        """The operator that needs the most pages, counted from 0, and how many it needs."""
        return self._largest_operator

    def _append_reserve(self, event: Reserve) -> None:
        if event.region != self.region_count:
            raise TraceError(f"region {event.region} appears where number {self.region_count} is next")
        if not 1 <= event.page_count < columns.LIMIT:
            raise TraceError(f"region {event.region} has {event.page_count} pages")
        self._columns.append(columns.RESERVE, int(event.stored), event.region, 0, event.page_count)
        self._region_pages.append(event.page_count)
        self._live.add(event.region)
        self._live_pages += event.page_count
        if event.stored:
            self._peak_pages += event.page_count
        self._peak_pages = max(self._peak_pages, self._live_pages)

    def _append_operator(self, operator: Operator) -> None:
        accesses = operator.accesses
        for region, first, count, mode in accesses:
            if mode not in MODES or len(mode) != 1:
                raise TraceError(f"mode {mode!r} is unknown; there are 'r', 'w' and 'o'")
            if region not in self._live:
                raise TraceError(f"an operator needs region {region}, which does not exist")
            if first < 0 or count < 1 or first + count > self._region_pages[region]:
                raise TraceError(
                    f"an operator needs {count} pages from page {first} of region {region}, which has "
                    f"{self._region_pages[region]}"
                )
        if len({access.region for access in accesses}) < len(accesses):
            accesses = _disjoint(accesses)
        needed = sum(access.page_count for access in accesses)
        self._columns.append(columns.OPERATOR, 0, 0, 0, len(accesses))
        for region, first, count, mode in accesses:
            self._columns.append(columns.ACCESS, MODES.index(mode), region, first, count)
        if needed > self._largest_operator[1]:
            self._largest_operator = (self.operator_count, needed)
        self.operator_count += 1
        self.page_uses += needed


def merge_modes(first: str | None, second: str) -> str:
    """The mode of a page that one operator uses in two ways."""
    return second if first is None or first == second else "w"


def _disjoint(accesses: Iterable[Access]) -> tuple[Access, ...]:
    """Cut accesses where they overlap; a page in more than one has the modes of all."""
    found: list[Access] = []
    by_region: dict[int, list[Access]] = {}
    for access in accesses:
        by_region.setdefault(access.region, []).append(access)
    for region, ranges in by_region.items():
        bounds = sorted({a.first_page for a in ranges} | {a.first_page + a.page_count for a in ranges})
        for start, end in itertools.pairwise(bounds):
            mode: str | None = None
            for _, first, count, one in ranges:
                if first <= start and end <= first + count:
                    mode = merge_modes(mode, one)
            if mode is None:
                continue
            last = found[-1] if found else None
            if last and last.region == region and last[1] + last[2] == start and last.mode == mode:
                found[-1] = Access(region, last.first_page, end - last.first_page, mode)
            else:
                found.append(Access(region, start, end - start, mode))
    return tuple(found)


def _read_element(element: Any, position: int) -> tuple[dict[int, str], list[int]]:
    """Read one element of a plain sequence: the mode of each page, and the pages released after."""
    try:
        pairs = [element] if isinstance(element[0], (int, np.integer)) else element
        pairs = [(whole(page), mode) for page, mode in pairs]
    except IndexError:
        return {}, []  # an operator that needs nothing
    except (TypeError, ValueError, KeyError):
        raise TraceError(
            f"element {position} is {element!r}; give (page, mode), or a list of such pairs"
        ) from None
    uses: dict[int, str] = {}
    released = []
    for page, mode in pairs:
        if page < 0:
            raise TraceError(f"element {position} names page {page}; pages are numbers from 0")
        if mode == RELEASED:
            released.append(page)
        elif mode in ("r", "w", "o"):
            uses[page] = merge_modes(uses.get(page), mode)
        else:
            raise TraceError(
                f"element {position} has mode {mode!r}; there are 'r' (read), 'w' (update), "
                "'o' (overwrite) and 'f' (released)"
            )
    return uses, released


def _unpack(packed: np.ndarray) -> Iterator[Event]:
    rows = iter(packed.tolist())
    for kind, mode, region, _, count in rows:
        if kind == columns.OPERATOR:
            accesses = []
            for _, (of, way, number, start, pages) in zip(range(count), rows):
                if of != columns.ACCESS or way >= len(MODES):
                    raise TraceError("an operator has fewer accesses than it says")
                accesses.append(Access(number, start, pages, MODES[way]))
            if len(accesses) != count:
                raise TraceError("an operator has fewer accesses than it says")
            yield Operator(tuple(accesses))
        elif kind == columns.RESERVE:
            yield Reserve(region, count, bool(mode))
        elif kind == columns.RELEASE:
            yield Release(region)
        elif kind == columns.STEP:
            yield Step()
        else:
            raise TraceError(f"there is no event of kind {kind}")
