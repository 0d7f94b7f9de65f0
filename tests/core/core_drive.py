# SPDX-License-Identifier: Apache-2.0
"""Ways to drive a `World`: to rest, to its end, and step by step from plain numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from core_model import EIO, PAGE_BYTES, Access, Pin, Range, Shape, pages_of
from core_placement import placeable
from core_world import World

from pagert._core import pager as c


def settle(world: World) -> None:
    """Carry out everything, successfully, until nothing is left to do. Failed pins are let go of.

    What still waits then must have a reason: nobody would ever wake it.
    """
    budget = 100 * (world.shape.page_count + sum(world.shape.frames))
    while True:
        progress = False
        while world.take() is not None:
            progress = True
            budget -= 1
            world.claim(budget > 0, "transfers without end")
        while world.flights:
            world.finish(world.flights[0])
            progress = True
        for pin in world.pending:
            world.poll(pin)
            progress |= pin.granted
        for pin in list(world.pins):
            if pin.failed:
                world.unpin(pin)
                progress = True
        if not progress:
            break
    world.verify()
    if waiting := world.pending:
        held = world.held_frames()
        blocked = [
            pin
            for pin in waiting
            if not placeable(world.shape.device, held, pin.ranges) or (held and len(pin.ranges) > 1)
        ]
        world.claim(blocked, [pin.name for pin in waiting], "could go on, but nothing moves")
    else:
        check_rest(world)


def check_rest(world: World) -> None:
    """Nothing is in flight or waiting: every frame belongs to a page, or is free."""
    world.lingering.clear()
    listed = [0] * c.TIER_COUNT
    for page in range(world.shape.page_count):
        info = world.core.page(page)
        for tier, frame in enumerate(info.frame):
            listed[tier] += frame != c.NONE
        if page not in world.truth:
            world.claim(info.state == c.FREE, "page", page, "is never freed", info)
        resting = info.state in (c.ZERO, c.ABSENT, c.RESIDENT, c.FREE)
        world.claim(resting, "page", page, "is under way, with nothing in flight", info)
    for tier in range(c.TIER_COUNT):
        usage = world.core.usage(tier)
        world.claim(usage.used_frames == listed[tier], "tier", tier, usage, "pages:", listed[tier])


def let_go(world: World) -> None:
    """Unpin everything, oldest first, as pins become ready."""
    settle(world)
    while world.pins:
        ready = world.granted
        world.claim(ready, "no pin is ready, none will be", [pin.name for pin in world.pins])
        for pin in ready:
            world.unpin(pin)
        settle(world)


def read_back(world: World) -> None:
    """Read every page of every region, one by one; each must be what was last written."""
    for region in list(world.regions):
        for index in range(region.page_count):
            pin = world.start([pages_of(region, index, 1)])
            if pin is None:
                continue
            settle(world)
            if pin.granted:
                world.unpin(pin)
    settle(world)


def close(world: World) -> None:
    """End in good order, and prove that nothing was lost and nothing leaks."""
    let_go(world)
    read_back(world)
    evict_everything(world)
    for region in list(world.regions):
        world.release(region)
        world.verify()
    settle(world)
    for tier in range(c.TIER_COUNT):
        world.claim(world.core.usage(tier).used_frames == 0, "tier", tier, "keeps frames")
    world.claim(world.core.reserved_pages == 0, "pages stay reserved")
    world.claim(world.core.held_frames == 0, "frames stay held")


def evict_everything(world: World) -> None:
    """With no pin held, every range leaves the device within as many rounds as it has pages."""
    for region in list(world.regions):
        for _ in range(2 * region.page_count + 2):
            left = world.evict(pages_of(region, 0, region.page_count))
            settle(world)
            if not left:
                break
        else:
            world.claim(False, region.name, "does not leave the device")


class Steps:
    """Operations on a world from numbers of any size: every sequence of them means something."""

    def __init__(self, world: World) -> None:
        self.world = world

    def region(self, pick: int) -> Range | None:
        regions = self.world.regions
        return regions[pick % len(regions)] if regions else None

    def pin(self, pick: int) -> Pin | None:
        pins = self.world.pins
        return pins[pick % len(pins)] if pins else None

    def access(self, pick: int, first: int, count: int, mode: int, ragged: int) -> Access | None:
        """Some bytes of a region; `ragged`: not from or to a page's border."""
        region = self.region(pick)
        if region is None:
            return None
        first %= region.page_count
        count = 1 + (count - 1) % (region.page_count - first)
        access = pages_of(region, first, count, mode % 3)
        head = 100 if ragged & 1 else 0
        tail = 7 if ragged & 2 else 0
        if head + tail >= access.size_bytes:
            return access
        size_bytes = access.size_bytes - head - tail
        return Access(region, access.offset_bytes + head, size_bytes, access.mode)

    def reserve(self, pages: int, ragged: int) -> None:
        pages = 1 + pages % (self.world.shape.device + 2)
        self.world.reserve(pages * PAGE_BYTES - (1000 if ragged & 1 else 0))

    def release(self, pick: int) -> None:
        if region := self.region(pick):
            self.world.release(region)

    def start(self, wishes: Sequence[tuple[int, int, int, int, int]]) -> None:
        accesses = [access for wish in wishes if (access := self.access(*wish)) is not None]
        if accesses:
            self.world.start(accesses)

    def poll(self, pick: int) -> None:
        if pin := self.pin(pick):
            self.world.poll(pin)

    def write(self, pick: int, page_pick: int) -> None:
        pin = self.pin(pick)
        if pin is not None and pin.granted:
            pages = [page for page, use in pin.uses.items() if use.writes]
            if pages:
                self.world.write(pin, pages[page_pick % len(pages)])

    def unpin(self, pick: int) -> None:
        if pin := self.pin(pick):
            self.world.unpin(pin)

    def evict(self, pick: int, first: int, count: int, ragged: int) -> None:
        if access := self.access(pick, first, count, c.READ, ragged):
            self.world.evict(access)

    def locate(self, pick: int, first: int, count: int, ragged: int) -> None:
        if access := self.access(pick, first, count, c.READ, ragged):
            self.world.locate(access)

    def prefetch(self, pick: int, first: int, count: int, ragged: int) -> None:
        if access := self.access(pick, first, count, c.READ, ragged):
            self.world.prefetch(access)

    def flush(self) -> None:
        self.world.flush()

    def take(self, link_mask: int) -> None:
        """Masks that leave a link out are rarer than the one that has them all."""
        mask = link_mask & c.ALL_LINKS if link_mask & 0x100 else c.ALL_LINKS
        self.world.take(mask)

    def finish(self, pick: int, failing: bool) -> None:
        flights = self.world.flights
        if flights:
            self.world.finish(flights[pick % len(flights)], EIO if failing else 0)

    def settle(self) -> None:
        settle(self.world)

    def reset_counters(self) -> None:
        self.world.reset_counters()


# How often a random walk takes each step; what carries the work out is the most frequent.
WEIGHTS = {
    "reserve": 3,
    "release": 2,
    "start": 10,
    "poll": 8,
    "write": 6,
    "unpin": 9,
    "evict": 2,
    "locate": 1,
    "flush": 1,
    "prefetch": 1,
    "take": 16,
    "finish": 14,
    "settle": 1,
    "reset_counters": 0.2,
}


def random_step(steps: Steps, rng: random.Random, failing: float, pins_max: int) -> None:
    """One step of a random walk."""
    name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    number = lambda: rng.randrange(1 << 16)  # noqa: E731
    ragged = number() if rng.random() < 0.3 else 0
    if name == "start":
        if len(steps.world.pins) >= pins_max:
            return
        wishes = [
            (number(), number(), number(), number(), number() if rng.random() < 0.3 else 0)
            for _ in range(rng.choice((1, 1, 1, 2, 3)))
        ]
        steps.start(wishes)
    elif name in ("reserve", "write"):
        getattr(steps, name)(number(), number())
    elif name in ("release", "poll", "unpin"):
        getattr(steps, name)(number())
    elif name in ("evict", "locate", "prefetch"):
        getattr(steps, name)(number(), number(), number(), ragged)
    elif name == "take":
        steps.take(rng.randrange(0x140))
    elif name == "finish":
        steps.finish(number(), rng.random() < failing)
    else:
        getattr(steps, name)()


def random_shape(rng: random.Random) -> Shape:
    """Any set-up of two or three tiers: tight frames, flash tight or ample."""
    device = rng.randint(2, 12)
    page_count = rng.randint(device + 2, 24)
    flash = rng.choice((page_count, rng.randint(1, 8)))
    host = rng.choice((page_count, rng.randint(1, 8), rng.randint(1, 8)))
    host, flash = rng.choice(((0, flash), (host, 0), (host, flash)))
    return Shape(device, host, flash, rng.randint(1, 8), page_count)
