# SPDX-License-Identifier: Apache-2.0
"""What must be true of the core at any moment: its view, compared with versions in dicts.

Each write of a page makes a new token, and the frames of every tier hold tokens instead of bytes.
The core must always know, for every page, frames that hold its last token; a difference is a
`Violation`, which prints the calls that led there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from core_model import (
    FETCHES,
    WRITEBACKS,
    ZERO_TOKEN,
    Flight,
    Pin,
    Range,
    Shape,
    Violation,
)

from pagert._core import core as c


class Truth:
    """The core, the frames' tokens, and what the core must never lose."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.core = shape.core()
        self.tokens = itertools.count(1)
        self.junk = itertools.count(-1, -1)
        self.names = itertools.count()
        self.arenas = [[next(self.junk) for _ in range(count)] for count in shape.frames]
        self.regions: list[Range] = []
        self.pins: list[Pin] = []
        self.flights: list[Flight] = []
        self.truth: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.write_pinned: set[int] = set()
        self.epoch: dict[int, int] = {}
        self.written_epoch: dict[tuple[int, int], int] = {}
        self.lingering: set[int] = set()
        self.failures: list[tuple[range, int, int]] = []
        self.moved = [0] * c.LINK_COUNT
        self.moves = [0] * c.LINK_COUNT
        self.failed_moves = 0
        self.granted_pages = 0
        self.prefetched_pages = 0
        self.was_full = False
        self.log: list[str] = []

    def claim(self, truth: bool, *words: object) -> None:
        if not truth:
            text = " ".join(str(word) for word in words)
            raise Violation(f"{text}\n{self.shape}\n" + "\n".join(self.log))

    def note(self, line: str) -> None:
        """Each call of the core ends with one."""
        self.log.append(line)
        self.was_full = self.was_full or self.full_is_justified()

    def region_of(self, page: int) -> Range | None:
        for region in self.regions:
            if page in region.pages:
                return region
        return None

    def holders(self, page: int) -> Iterator[Pin]:
        return (pin for pin in self.pins if page in pin.uses)

    @property
    def granted(self) -> list[Pin]:
        return [pin for pin in self.pins if pin.granted]

    @property
    def pending(self) -> list[Pin]:
        return [pin for pin in self.pins if not pin.granted and not pin.failed]

    def held_frames(self) -> dict[int, int]:
        """Page to frame of everything that a ready pin holds."""
        return {page: frame for pin in self.granted for page, frame in pin.frames.items()}

    def full_is_justified(self) -> bool:
        """Whether more dirty bytes than the lowest tier has free frames could have to go down."""
        if self.shape.lowest_ample:
            return False
        low = self.shape.tiers[-1]
        usage = self.core.usage(low)
        free = usage.capacity_frames - usage.used_frames
        if free >= len(self.truth):
            return False
        going = 0
        for page in self.truth:
            info = self.core.page(page)
            lower_is_lowest = info.frame[low] != c.NONE
            on_device = info.frame[c.DEVICE] != c.NONE and info.dirty
            on_host = low == c.FLASH and info.frame[c.HOST] != c.NONE
            going += not lower_is_lowest and (on_device or on_host)
        return free < going

    def check_frames_refusal(
        self, error: c.CoreError, exact: bool, feasible: bool, range_count: int, page_count: int
    ) -> None:
        self.claim(self.pins or page_count > self.shape.device, "nothing is held, but", error)
        self.claim(not (exact and feasible and range_count == 1), "it has a place, but", error)
        self.claim(error.frames_needed > 0, "frames_needed is not set")
        self.claim(error.frames_unheld <= self.shape.device, "frames_unheld", error)

    def check_pin_failure(self, error: c.CoreError) -> None:
        if error.code == c.E_FULL:  # it failed when they were full, and is told now
            self.claim(self.was_full, "the lower tiers have room, but", error)
            return
        self.claim(error.code == c.E_TRANSFER, "a pending pin failed with", error)
        failure = error.failure
        known = any(
            failure.page in pages and failure.link == link and failure.result == result
            for pages, link, result in self.failures
        )
        self.claim(known, "no such transfer failed:", error)

    def check_flight(self, flight: Flight) -> None:
        link = flight.transfer.link
        source_tier, target_tier = flight.tiers
        for other in self.flights:
            for frame in flight.targets:
                self.claim(not other.writes(target_tier, frame), "two transfers into one frame")
                self.claim(not other.reads(target_tier, frame), "into the source of", other.name)
            if source_tier is not None:
                for frame in flight.sources:
                    self.claim(not other.writes(source_tier, frame), "out of the target of", other)
            same = set(flight.pages) & set(other.pages) and target_tier == other.tiers[1]
            self.claim(not same, "two transfers of one page to one tier at once")
        if link == c.MOVE:
            self.claim(not set(flight.sources) & set(flight.targets), "MOVE onto itself")
        held = self.held_frames()
        for index, page in enumerate(flight.pages):
            info = self.core.page(page)
            target = flight.targets[index]
            self.check_target(target_tier, target)
            truth = self.truth[page]
            if link == c.FILL:
                self.claim(truth == ZERO_TOKEN, "FILL of page", page, "whose bytes are not zero")
            else:
                token = flight.source_tokens[index]
                self.claim(token == truth, f"page {page} moves as {token}, it is {truth}")
            if link in FETCHES or link == c.FILL:
                self.claim(self.is_wanted(page), "page", page, "is fetched but nobody reads it")
            if link in FETCHES or link in WRITEBACKS:
                self.claim(page in self.write_pinned, "I/O for page", page, "which is zero")
            if link in WRITEBACKS:
                self.check_writeback(page, info, target_tier)
            if link == c.MOVE:
                self.claim(page not in held, "page", page, "moves while it is held")

    def is_wanted(self, page: int) -> bool:
        """Whether a pin waits for the page's bytes, or did when it was let go of."""
        waiting = any(not p.granted and p.uses[page].needs_bytes for p in self.holders(page))
        return waiting or page in self.lingering

    def check_target(self, tier: int, frame: int) -> None:
        """No transfer may write over the valid copy of any page."""
        self.claim(tier != c.DEVICE or frame not in self.held_frames().values(), "a held frame")
        page = self.owners.get(self.arenas[tier][frame])
        if page in self.truth and self.truth[page] == self.arenas[tier][frame]:
            valid = self.core.page(page).frame[tier]
            self.claim(valid != frame, "the target holds a valid copy of page", page)

    def check_writeback(self, page: int, info: c.PageInfo, target_tier: int) -> None:
        lower = [info.frame[tier] for tier in self.shape.tiers if tier >= target_tier]
        clean = any(frame != c.NONE for frame in lower)
        self.claim(not clean, "page", page, "is clean and written again", info)
        if self.shape.ample:
            again = self.written_epoch.get((target_tier, page)) == self.epoch[page]
            self.claim(not again, "page", page, "was written before and has not changed")
        for pin in self.holders(page):
            granted = pin.granted and pin.uses[page].writes
            self.claim(not granted, "page", page, "is written back while", pin.name, "writes it")

    def check_held_frames(self) -> None:
        """No two pages of ready pins share a frame, and no transfer is about to change one."""
        owners: dict[int, int] = {}
        for pin in self.granted:
            for page, frame in pin.frames.items():
                self.claim(owners.setdefault(frame, page) == page, "frame", frame, "has two pages")
                info = self.core.page(page)
                self.claim(
                    info.frame[c.DEVICE] == frame, "held page", page, "is not at", frame, info
                )
                for flight in self.flights:
                    self.claim(
                        not flight.writes(c.DEVICE, frame), flight.name, "writes a held frame"
                    )
                    if pin.uses[page].writes:
                        reads = flight.reads(c.DEVICE, frame)
                        self.claim(not reads, flight.name, "reads a frame that", pin.name, "writes")

    def verify(self) -> None:
        """Compare the core's whole view with the truth."""
        line = self.core.check()
        self.claim(line == 0, "pagert_check: line", line)
        self.check_held_frames()
        self.check_pages()
        self.check_totals()

    def check_pages(self) -> None:
        taken: dict[tuple[int, int], int] = {}
        unsettled = {
            page
            for pin in self.pins
            if not pin.granted
            for page, use in pin.uses.items()
            if not use.needs_bytes
        }
        for page in range(self.shape.page_count):
            info = self.core.page(page)
            copies = {tier: frame for tier, frame in enumerate(info.frame) if frame != c.NONE}
            for copy in copies.items():
                other = taken.setdefault(copy, page)
                self.claim(other == page, f"pages {other} and {page} share frame {copy}")
                self.claim(copy[1] < self.shape.frames[copy[0]], "frame beyond the tier", info)
            if page not in self.truth:
                busy = any(page in flight.pages for flight in self.flights)
                self.claim(info.state == c.FREE or busy, "page", page, "is not free", info)
                continue
            self.check_page(page, info, copies, page in unsettled)

    def check_page(
        self, page: int, info: c.PageInfo, copies: dict[int, int], unsettled: bool
    ) -> None:
        truth = self.truth[page]
        self.claim(info.state != c.FREE, "page", page, "of a live region is free")
        for tier, frame in copies.items():
            # A frame that waits to be overwritten may hold anything until its pin is ready.
            if not (tier == c.DEVICE and unsettled):
                token = self.arenas[tier][frame]
                self.claim(
                    token == truth, f"page {page} is {truth}, its copy in {tier} {token}", info
                )
        safe = any(self.arenas[tier][frame] == truth for tier, frame in copies.items())
        self.claim(safe or truth == ZERO_TOKEN, f"the last copy of page {page} is lost", info)
        lower = any(tier != c.DEVICE for tier in copies)
        resident = c.DEVICE in copies
        if info.state == c.ZERO:
            self.claim(truth == ZERO_TOKEN and not copies, "page", page, "is not zero", info)
        elif info.state == c.ABSENT:
            self.claim(lower and not resident, "absent page", page, info)
        elif info.state == c.FETCHING:
            self.claim(not resident, "fetching page", page, info)
        else:
            self.claim(resident, "page", page, "has no device frame", info)
        if info.dirty:
            self.claim(resident and not lower, "dirty page", page, info)
        elif resident:
            self.claim(lower or truth == ZERO_TOKEN, "clean page", page, "has no other copy", info)
        sure = sum(1 for pin in self.holders(page) if pin.granted)
        most = sum(page in a.pages for pin in self.pins for a in pin.accesses)
        self.claim(sure <= info.holds <= most, "page", page, "is held", sure, most, info)

    def check_totals(self) -> None:
        for tier in range(c.TIER_COUNT):
            usage = self.core.usage(tier)
            frames = {
                frame
                for page in self.truth
                if (frame := self.core.page(page).frame[tier]) != c.NONE
            }
            frames |= {
                f for flight in self.flights if flight.tiers[1] == tier for f in flight.targets
            }
            self.claim(usage.capacity_frames == self.shape.frames[tier], tier, usage)
            self.claim(usage.used_frames <= usage.capacity_frames, tier, usage)
            self.claim(usage.used_frames <= usage.peak_frames, tier, usage)
            self.claim(usage.peak_frames <= usage.capacity_frames, tier, usage)
            self.claim(usage.used_frames >= len(frames), tier, usage, frames)
        counters = self.core.counters()
        self.claim(list(counters.transferred) == self.moved, counters, self.moved)
        self.claim(list(counters.transfers) == self.moves, counters, self.moves)
        self.claim(counters.failed_transfers == self.failed_moves, counters, self.failed_moves)
        seen = counters.hits + counters.faults
        self.claim(seen == self.granted_pages, "hits and faults", counters, self.granted_pages)
        most = self.prefetched_pages
        self.claim(counters.prefetches <= most, "prefetches of", most, counters)
        self.claim(self.core.in_flight == len(self.flights), "in flight", self.core.in_flight)
        reserved = sum(region.page_count for region in self.regions)
        self.claim(self.core.reserved_pages == reserved, "reserved", self.core.reserved_pages)
        sure = len({page for pin in self.granted for page in pin.uses})
        most = len({page for pin in self.pins for page in pin.uses})
        held = self.core.held_frames
        self.claim(sure <= held <= most, "held frames", sure, held, most)
