# SPDX-License-Identifier: Apache-2.0
"""A naive world around one core: versions instead of bytes, dicts instead of a page table.

This driver moves the tokens itself when it carries out what `next_transfer` hands out: late, in
any order, and failing where it is told to. Each answer of the core is compared with the truth.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from core_model import (
    LINK_NAMES,
    LINKS,
    MODE_NAMES,
    PAGE_BYTES,
    WRITEBACKS,
    ZERO_TOKEN,
    Access,
    Flight,
    Pin,
    Range,
)
from core_placement import merge_ranges, placeable
from core_truth import Truth

from pagert._core import core as c


class World(Truth):
    """The truth, and everything that can be done to the core."""

    def reserve(self, size_bytes: int) -> Range | None:
        page_count = -(-size_bytes // PAGE_BYTES)
        states = [self.core.page(page).state for page in range(self.shape.page_count)]
        busy = {page for flight in self.flights for page in flight.region.pages}
        free = [state == c.FREE and page not in busy for page, state in enumerate(states)]
        runs = [len(list(run)) for usable, run in itertools.groupby(free) if usable]
        name = f"r{next(self.names)}"
        try:
            handle = self.core.reserve(size_bytes)
        except c.CoreError as error:
            self.note(f"core.reserve({size_bytes})  # {error}")
            self.claim(error.code == c.E_PAGES, "reserve", error)
            self.claim(max(runs, default=0) < page_count, "a long enough run of pages is free")
            return None
        self.note(f"{name} = core.reserve({size_bytes})  # {tuple(handle)}")
        region = Range(name, handle, size_bytes)
        for page in region.pages:
            self.claim(page < self.shape.page_count, "region beyond the address space")
            self.claim(states[page] == c.FREE, "page", page, "was not free")
            self.claim(self.core.page(page).state == c.ZERO, "page", page, "is not zero")
            self.truth[page] = ZERO_TOKEN
            self.epoch[page] = 0
        self.regions.append(region)
        return region

    def release(self, region: Range) -> bool:
        held = any(page in pin.uses for pin in self.pins for page in region.pages)
        try:
            self.core.release(region.handle)
        except c.CoreError as error:
            self.note(f"core.release({region.name})  # {error}")
            self.claim(error.code == c.E_STATE and held, "release", error)
            return False
        self.note(f"core.release({region.name})")
        self.claim(not held, "a region was released while a pin holds it")
        self.regions.remove(region)
        for page in region.pages:
            del self.truth[page]
            self.lingering.discard(page)
            self.write_pinned.discard(page)
            self.written_epoch.pop((c.HOST, page), None)
            self.written_epoch.pop((c.FLASH, page), None)
        return True

    def start(self, accesses: Sequence[Access]) -> Pin | None:
        """Start a pin. None if it was refused, which is then justified."""
        ranges = merge_ranges((access.pages.start, access.pages.stop) for access in accesses)
        pages = {page for first, end in ranges for page in range(first, end)}
        exact = all(pin.granted for pin in self.pins)
        held = self.held_frames()
        feasible = placeable(self.shape.device, held, ranges)
        alone = all(placeable(self.shape.device, held, [pages]) for pages in ranges)
        asked = ", ".join(
            f"({a.region.name}, {a.offset_bytes}, {a.size_bytes}, {MODE_NAMES[a.mode]})"
            for a in accesses
        )
        name = f"p{next(self.names)}"
        unheld = self.shape.device - self.core.held_frames
        fresh = sum(1 for page in pages if not any(True for _ in self.holders(page)))
        try:
            core_pin = self.core.pin(
                [(a.region.handle, a.offset_bytes, a.size_bytes, a.mode) for a in accesses]
            )
        except c.CoreError as error:
            self.note(f"core.pin([{asked}])  # {error}")
            if error.code == c.E_FRAMES:
                self.check_frames_refusal(error, exact, feasible, len(ranges), len(pages))
            else:
                self.claim(error.code == c.E_FULL, "pin refused with", error)
                self.claim(self.full_is_justified(), "the lower tiers have room, but", error)
                self.lingering |= pages  # what was begun for it before it failed goes on
            return None
        pin = Pin(name, core_pin, accesses)
        self.note(f"{name} = core.pin([{asked}])  # {'ready' if core_pin.ready else 'pending'}")
        # That several windows get in each other's way, the core may find out later.
        self.claim(not exact or alone, "a pin was accepted that cannot be placed")
        self.claim(fresh <= unheld, "a pin was accepted for more frames than are unheld")
        for access, got in zip(accesses, core_pin.accesses, strict=True):
            self.claim(got.first_page == access.pages.start, "first_page", got)
            self.claim(got.page_count == len(access.pages), "page_count", got)
        self.pins.append(pin)
        for page, use in pin.uses.items():
            if use.writes:
                self.write_pinned.add(page)
                self.epoch[page] += 1
        if core_pin.ready:
            self.grant(pin)
        return pin

    def poll(self, pin: Pin) -> None:
        if pin.failed:
            return
        try:
            ready = pin.core_pin.poll()
        except c.CoreError as error:
            self.note(f"{pin.name}.poll()  # {error}")
            self.claim(not pin.granted, "a ready pin failed")
            if error.code == c.E_FRAMES:
                # What others pinned since it was accepted lies in its way now.
                others = len(self.pins) > 1
                self.claim(others, "a pin was accepted and has no place", error)
            else:
                self.check_pin_failure(error)
            pin.failed = True
            return
        self.note(f"{pin.name}.poll()  # {'ready' if ready else 'pending'}")
        if pin.granted:
            self.claim(ready, "a ready pin is not ready any more")
        elif ready:
            self.grant(pin)

    def grant(self, pin: Pin) -> None:
        """The core says ready: look through the addresses, then write what is overwritten."""
        pin.granted = True
        self.granted_pages += len(pin.uses)
        for page, use in pin.uses.items():
            if use.writes:
                self.epoch[page] += 1
        for access, got in zip(pin.accesses, pin.core_pin.accesses, strict=True):
            base, within = divmod(got.device_bytes, PAGE_BYTES)
            self.claim(within == access.offset_bytes % PAGE_BYTES, "device_bytes", got, access)
            self.claim(base + len(access.pages) <= self.shape.device, "window beyond the device")
            for page, frame in zip(access.pages, itertools.count(base)):
                known = pin.frames.setdefault(page, frame)
                self.claim(known == frame, "page", page, "at two addresses in one pin")
        for page, frame in pin.frames.items():
            use = pin.uses[page]
            if use.needs_bytes:
                self.claim(
                    self.arenas[c.DEVICE][frame] == self.truth[page],
                    f"{pin.name} sees {self.arenas[c.DEVICE][frame]} for page {page},",
                    f"which was last written as {self.truth[page]}",
                )
        self.check_held_frames()
        for page, use in pin.uses.items():
            if not use.needs_bytes:
                self.write(pin, page)

    def write(self, pin: Pin, page: int) -> None:
        """What an operator does with a page that it pinned for it."""
        token = next(self.tokens)
        self.owners[token] = page
        self.truth[page] = token
        self.arenas[c.DEVICE][pin.frames[page]] = token
        self.note(f"# {pin.name} writes page {page} as {token}")

    def unpin(self, pin: Pin) -> None:
        pin.core_pin.release()
        self.note(f"{pin.name}.release()")
        self.pins.remove(pin)
        if not pin.granted:
            self.lingering |= {page for page, use in pin.uses.items() if use.needs_bytes}

    def evict(self, access: Access) -> int | None:
        pages = access.pages
        held = [page for page in pages if any(True for _ in self.holders(page))]
        surely = [page for page in held if any(pin.granted for pin in self.holders(page))]
        call = f"core.evict({access.region.name}, {access.offset_bytes}, {access.size_bytes})"
        try:
            left = self.core.evict(access.region.handle, access.offset_bytes, access.size_bytes)
        except c.CoreError as error:
            self.note(f"{call}  # {error}")
            if error.code == c.E_STATE:
                self.claim(held, "evict", error)
            else:
                self.check_pin_failure(error)
            return None
        self.note(f"{call}  # {left}")
        self.claim(not surely, "evict took held pages", surely)
        self.claim(left <= len(pages), "evict counts", left, "of", len(pages), "pages")
        if left == 0:
            for page in pages:
                info = self.core.page(page)
                self.claim(info.frame[c.DEVICE] == c.NONE, "page", page, "was evicted but", info)
        return left

    def prefetch(self, access: Access) -> None:
        call = f"core.prefetch({access.region.name}, {access.offset_bytes}, {access.size_bytes})"
        try:
            fits = self.core.prefetch(access.region.handle, access.offset_bytes, access.size_bytes)
        except c.CoreError as error:
            self.note(f"{call}  # {error}")
            if error.code == c.E_FULL:
                self.claim(self.full_is_justified(), "the lower tiers have room, but", error)
                self.lingering |= set(access.pages)
            else:
                self.claim(error.code == c.E_FRAMES, "prefetch", error)
            return
        self.note(f"{call}  # {fits}")
        self.lingering |= set(access.pages)
        self.prefetched_pages += len(access.pages)

    def flush(self) -> int | None:
        try:
            left = self.core.flush()
        except c.CoreError as error:
            self.note(f"core.flush()  # {error}")
            self.check_pin_failure(error)
            return None
        self.note(f"core.flush()  # {left}")
        dirty = [page for page in self.truth if self.core.page(page).dirty]
        most = [p for p in dirty if not any(pin.granted for pin in self.holders(p))]
        least = [p for p in dirty if not any(True for _ in self.holders(p))]
        self.claim(len(least) <= left <= len(most), "flush says", left, "where dirty are", most)
        return left

    def take(self, link_mask: int = c.ALL_LINKS) -> Flight | None:
        """Ask for a transfer and begin to carry it out."""
        transfer = self.core.next_transfer(link_mask)
        if transfer is None:
            return None
        name = f"t{next(self.names)}"
        link, first, count, source, target = transfer
        self.note(
            f"{name} = core.next_transfer(0x{link_mask:x})  # {LINK_NAMES.get(link, link)}"
            f" pages {first}+{count}, frames {source} -> {target}"
        )
        self.claim(link_mask >> link & 1, "a link that was not asked for")
        self.claim(link in self.shape.links, "not a link between neighbouring configured tiers")
        self.claim(1 <= count <= self.shape.transfer_pages_max, "pages joined:", count)
        region = self.region_of(first)
        self.claim(region is not None, "a transfer of a page that belongs to no region")
        self.claim(first + count <= region.pages.stop, "a transfer across the end of a region")
        source_tier, target_tier = LINKS[link]
        tokens = []
        if source_tier is None:
            self.claim(source == c.NONE, "FILL has a source")
        else:
            self.claim(source + count <= self.shape.frames[source_tier], "source beyond the tier")
            tokens = self.arenas[source_tier][source : source + count]
        self.claim(target + count <= self.shape.frames[target_tier], "target beyond the tier")
        epochs = [self.epoch[page] for page in range(first, first + count)]
        flight = Flight(name, transfer, tokens, region, epochs)
        self.check_flight(flight)
        for frame in flight.targets:
            self.arenas[target_tier][frame] = next(self.junk)
        self.flights.append(flight)
        return flight

    def finish(self, flight: Flight, result: int = 0) -> None:
        """End a transfer. The bytes move first, then the core hears of it."""
        source_tier, target_tier = flight.tiers
        if source_tier is not None:
            now = [self.arenas[source_tier][frame] for frame in flight.sources]
            self.claim(now == flight.source_tokens, flight.name, "had its source changed in flight")
        link, count = flight.transfer.link, flight.transfer.page_count
        if result == 0:
            tokens = flight.source_tokens or [ZERO_TOKEN] * count
            for frame, token in zip(flight.targets, tokens, strict=True):
                self.arenas[target_tier][frame] = token
            self.moved[link] += count
            self.moves[link] += 1
            if flight.region in self.regions:
                for page, epoch in zip(flight.pages, flight.epochs, strict=True):
                    if target_tier == c.DEVICE:
                        self.lingering.discard(page)
                    if link in WRITEBACKS:
                        self.written_epoch[target_tier, page] = epoch
        else:
            self.failures.append((flight.pages, link, result))
            self.failed_moves += 1
        self.flights.remove(flight)
        self.core.complete(flight.transfer, result)
        self.note(f"core.complete({flight.name}, {result})")

    def locate(self, access: Access) -> None:
        got = self.core.locate(access.region.handle, access.offset_bytes, access.size_bytes)
        self.claim(sum(got) == len(access.pages), "locate does not add up", got)
        infos = [self.core.page(page) for page in access.pages]
        written = [
            info
            for info, page in zip(infos, access.pages, strict=True)
            if self.truth[page] != ZERO_TOKEN
        ]
        self.claim(got.zero <= len(infos) - len(written), "locate: written pages are zero", got)
        for tier, counted in zip(range(c.TIER_COUNT), got[1:], strict=True):
            fastest = [
                i
                for i in written
                if next((t for t, f in enumerate(i.frame) if f != c.NONE), None) == tier
            ]
            self.claim(counted >= len(fastest), "locate", got, "tier", tier, len(fastest))

    def reset_counters(self) -> None:
        self.core.reset_counters()
        self.note("core.reset_counters()")
        self.moved = [0] * c.LINK_COUNT
        self.moves = [0] * c.LINK_COUNT
        self.failed_moves = 0
        self.granted_pages = 0
        self.prefetched_pages = 0
        for tier in range(c.TIER_COUNT):
            usage = self.core.usage(tier)
            self.claim(usage.peak_frames == usage.used_frames, "peak after reset", usage)
        self.claim(self.core.counters().hits + self.core.counters().faults == 0, "counters stay")
