# SPDX-License-Identifier: Apache-2.0
"""Steps on a `World` from plain numbers: for Hypothesis, for random walks, and to shrink those."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from core_drive import close, drain
from core_model import EIO, PAGE_BYTES, Access, Pin, Range, Shape, Violation, pages_of
from core_world import World

from pagert._core import core as c

Step = tuple[str, tuple]


class Steps:
    """Operations on a world from numbers of any size: every sequence of them means something."""

    def __init__(self, world: World, pins_max: int = 5) -> None:
        self.world = world
        self.pins_max = pins_max

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
        if len(self.world.pins) >= self.pins_max:
            return
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

    def drain(self) -> None:
        drain(self.world)

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
    "drain": 1,
    "reset_counters": 0.2,
}


def random_step(rng: random.Random, failing: float) -> Step:
    """One step of a random walk; `failing` is the probability that a transfer does."""
    name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]

    def number() -> int:
        return rng.randrange(1 << 16)

    ragged = number() if rng.random() < 0.3 else 0
    if name == "start":
        count = rng.choice((1, 1, 1, 2, 3))
        wishes = [
            (number(), number(), number(), number(), number() if rng.random() < 0.3 else 0)
            for _ in range(count)
        ]
        return name, (wishes,)
    if name in ("reserve", "write"):
        return name, (number(), number())
    if name in ("release", "poll", "unpin"):
        return name, (number(),)
    if name in ("evict", "locate", "prefetch"):
        return name, (number(), number(), number(), ragged)
    if name == "take":
        return name, (rng.randrange(0x140),)
    if name == "finish":
        return name, (number(), rng.random() < failing)
    return name, ()


@dataclasses.dataclass
class Walk:
    """A set-up and what to do with it."""

    shape: Shape
    pins_max: int
    steps: list[Step]
    broken: bool = False  # at the end every transfer fails, until nothing is left to do

    def run(self) -> None:
        """Raise `Violation` if the core breaks a promise on the way or at the end."""
        world = World(self.shape)
        steps = Steps(world, self.pins_max)
        for name, arguments in self.steps:
            getattr(steps, name)(*arguments)
            world.verify()
        if self.broken:
            drain(world, EIO)
        close(world)

    def violation(self) -> Violation | None:
        try:
            self.run()
        except Violation as violation:
            return violation
        return None

    def shrink(self, runs_max: int = 300) -> Walk:
        """Leave steps out as long as it still fails in the same words, in so many runs at most."""
        kind = claim_of(self.violation())
        walk = self
        length = len(walk.steps)
        while length > 0:
            start = 0
            while start < len(walk.steps) and runs_max > 0:
                runs_max -= 1
                shorter = dataclasses.replace(
                    walk, steps=walk.steps[:start] + walk.steps[start + length :]
                )
                if claim_of(shorter.violation()) == kind:
                    walk = shorter
                else:
                    start += length
            length //= 2
        return walk


def claim_of(violation: Violation | None) -> str | None:
    """The words of a violation, without its numbers."""
    if violation is None:
        return None
    line = str(violation).splitlines()[0]
    return "".join(letter for letter in line.split("(")[0] if not letter.isdigit())


def random_walk(rng: random.Random, length: int, failing: float) -> Walk:
    """Any set-up, and `length` steps."""
    shape = random_shape(rng)
    pins_max = rng.randint(1, 6)
    steps = [random_step(rng, failing) for _ in range(length)]
    return Walk(shape, pins_max, steps, broken=failing > 0 and rng.random() < 0.5)


def random_shape(rng: random.Random) -> Shape:
    """Any set-up of two or three tiers: tight frames, flash tight or ample."""
    device = rng.randint(2, 12)
    page_count = rng.randint(device + 2, 24)
    flash = rng.choice((page_count, rng.randint(1, 8)))
    host = rng.choice((page_count, rng.randint(1, 8), rng.randint(1, 8)))
    host, flash = rng.choice(((0, flash), (host, 0), (host, flash)))
    policy = rng.choice(["lru", "lookahead"])
    return Shape(device, host, flash, rng.randint(1, 8), page_count, policy)
