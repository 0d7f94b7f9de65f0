# SPDX-License-Identifier: Apache-2.0
"""The words of the naive world: set-ups, regions, accesses, pins and transfers in flight."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from core_placement import merge_ranges

from pagert._core import core as c

PAGE_BYTES = 4096
ZERO_TOKEN = 0
EIO = -5

# The tiers that each link joins. FILL has no source.
LINKS = {
    c.FILL: (None, c.DEVICE),
    c.MOVE: (c.DEVICE, c.DEVICE),
    c.HOST_TO_DEVICE: (c.HOST, c.DEVICE),
    c.FLASH_TO_DEVICE: (c.FLASH, c.DEVICE),
    c.FLASH_TO_HOST: (c.FLASH, c.HOST),
    c.DEVICE_TO_HOST: (c.DEVICE, c.HOST),
    c.DEVICE_TO_FLASH: (c.DEVICE, c.FLASH),
    c.HOST_TO_FLASH: (c.HOST, c.FLASH),
}
LINK_NAMES = {
    getattr(c, name): name
    for name in (
        "FILL",
        "MOVE",
        "HOST_TO_DEVICE",
        "FLASH_TO_DEVICE",
        "FLASH_TO_HOST",
        "DEVICE_TO_HOST",
        "DEVICE_TO_FLASH",
        "HOST_TO_FLASH",
    )
}
MODE_NAMES = {c.READ: "READ", c.UPDATE: "UPDATE", c.OVERWRITE: "OVERWRITE"}
WRITEBACKS = (c.DEVICE_TO_HOST, c.DEVICE_TO_FLASH, c.HOST_TO_FLASH)
FETCHES = (c.HOST_TO_DEVICE, c.FLASH_TO_DEVICE, c.FLASH_TO_HOST)


class Violation(AssertionError):
    """The core broke a promise. The message ends with the calls that lead there."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A configuration of the core."""

    device: int
    host: int
    flash: int
    transfer_pages_max: int = 1
    page_count: int = 24
    policy: str = "lru"

    @property
    def frames(self) -> tuple[int, int, int]:
        return (self.device, self.host, self.flash)

    @property
    def tiers(self) -> list[int]:
        return [tier for tier in range(c.TIER_COUNT) if self.frames[tier]]

    @property
    def links(self) -> set[int]:
        """Links between neighbouring configured tiers, and the two that stay on the device."""
        pairs = set(itertools.pairwise(self.tiers))
        pairs |= {(target, source) for source, target in pairs}
        pairs |= {(None, c.DEVICE), (c.DEVICE, c.DEVICE)}
        return {link for link, pair in LINKS.items() if pair in pairs}

    @property
    def ample(self) -> bool:
        """Every lower tier has a frame for every virtual page, so nothing need be rewritten."""
        return all(self.frames[tier] >= self.page_count for tier in self.tiers[1:])

    @property
    def lowest_ample(self) -> bool:
        """The lowest tier has a frame for every virtual page, so that nothing is ever full."""
        return self.frames[self.tiers[-1]] >= self.page_count

    def core(self) -> c.Core:
        return c.Core(
            page_bytes=PAGE_BYTES,
            page_count=self.page_count,
            device_frames=self.device,
            host_frames=self.host,
            flash_frames=self.flash,
            transfer_pages_max=self.transfer_pages_max,
            policy=self.policy,
        )


@dataclasses.dataclass
class Range:
    """A live region."""

    name: str
    handle: c.RegionHandle
    size_bytes: int

    @property
    def first(self) -> int:
        return self.handle.first_page

    @property
    def page_count(self) -> int:
        return -(-self.size_bytes // PAGE_BYTES)

    @property
    def pages(self) -> range:
        return range(self.first, self.first + self.page_count)


@dataclasses.dataclass(frozen=True)
class Access:
    """One access of a pin, as the caller asks for it."""

    region: Range
    offset_bytes: int
    size_bytes: int
    mode: int

    @property
    def pages(self) -> range:
        first = self.offset_bytes // PAGE_BYTES
        end = -(-(self.offset_bytes + self.size_bytes) // PAGE_BYTES)
        return range(self.region.first + first, self.region.first + end)

    def overwrites(self, page: int) -> bool:
        """Whether every byte of the page is going to be written."""
        if self.mode != c.OVERWRITE:
            return False
        start = (page - self.region.first) * PAGE_BYTES
        end = min(start + PAGE_BYTES, self.region.size_bytes)
        return self.offset_bytes <= start and self.offset_bytes + self.size_bytes >= end


@dataclasses.dataclass
class Use:
    """What a pin does with one page."""

    needs_bytes: bool = False
    writes: bool = False


class Pin:
    """A pin that the core accepted, from its start to its release."""

    def __init__(self, name: str, core_pin: c.CorePin, accesses: Sequence[Access]) -> None:
        self.name = name
        self.core_pin = core_pin
        self.accesses = list(accesses)
        self.granted = False
        self.failed = False
        self.frames: dict[int, int] = {}
        self.uses: dict[int, Use] = {}
        for access in accesses:
            for page in access.pages:
                use = self.uses.setdefault(page, Use())
                use.needs_bytes |= not access.overwrites(page)
                use.writes |= access.mode != c.READ

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return merge_ranges((access.pages.start, access.pages.stop) for access in self.accesses)


@dataclasses.dataclass
class Flight:
    """A transfer that was handed out and has not ended."""

    name: str
    transfer: c.Transfer
    source_tokens: list[int]
    region: Range
    epochs: list[int]

    @property
    def pages(self) -> range:
        return range(self.transfer.first_page, self.transfer.first_page + self.transfer.page_count)

    @property
    def tiers(self) -> tuple[int | None, int]:
        return LINKS[self.transfer.link]

    @property
    def targets(self) -> range:
        first = self.transfer.target_frame
        return range(first, first + self.transfer.page_count)

    @property
    def sources(self) -> range:
        first = self.transfer.source_frame
        return range(first, first + self.transfer.page_count)

    def reads(self, tier: int, frame: int) -> bool:
        return self.tiers[0] == tier and frame in self.sources

    def writes(self, tier: int, frame: int) -> bool:
        return self.tiers[1] == tier and frame in self.targets


def whole(region: Range, mode: int = c.READ) -> Access:
    """Access all of a region."""
    return Access(region, 0, region.size_bytes, mode)


def pages_of(region: Range, first: int, count: int, mode: int = c.READ) -> Access:
    """Access some pages of a region, the last one only as far as the region goes."""
    start = first * PAGE_BYTES
    end = min((first + count) * PAGE_BYTES, region.size_bytes)
    return Access(region, start, end - start, mode)
