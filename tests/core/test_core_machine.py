# SPDX-License-Identifier: Apache-2.0
"""The core against a naive model, driven by Hypothesis: every promise after every step."""

from __future__ import annotations

import pytest
from core_drive import close
from core_model import Shape
from core_steps import Steps
from core_world import World
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

# Shrinking takes what it takes; the suite's limit would end the whole run instead of this test.
pytestmark = pytest.mark.timeout(1200)

number = st.integers(0, 15)
wish = st.tuples(number, number, number, st.integers(0, 2), st.integers(0, 3))


class CoreMachine(RuleBasedStateMachine):
    """All that can be done to a core, in any order; transfers are late, out of order, and fail."""

    shapes: st.SearchStrategy[Shape]

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        shape = data.draw(self.shapes, label="shape")
        self.world = World(shape)
        self.steps = Steps(self.world)

    @rule(pages=number, ragged=st.integers(0, 1))
    def reserve(self, pages: int, ragged: int) -> None:
        self.steps.reserve(pages, ragged)

    @precondition(lambda self: self.world.regions)
    @rule(pick=number)
    def release(self, pick: int) -> None:
        self.steps.release(pick)

    @precondition(lambda self: self.world.regions and len(self.world.pins) < 5)
    @rule(wishes=st.lists(wish, min_size=1, max_size=3))
    def start(self, wishes: list[tuple[int, int, int, int, int]]) -> None:
        self.steps.start(wishes)

    @precondition(lambda self: self.world.regions and len(self.world.pins) < 5)
    @rule(wish=wish)
    def start_and_settle(self, wish: tuple[int, int, int, int, int]) -> None:
        self.steps.start([wish])
        self.steps.drain()

    @precondition(lambda self: self.world.pins)
    @rule(pick=number)
    def poll(self, pick: int) -> None:
        self.steps.poll(pick)

    @precondition(lambda self: self.world.granted)
    @rule(pick=number, page=number)
    def write(self, pick: int, page: int) -> None:
        self.steps.write(pick, page)

    @precondition(lambda self: self.world.pins)
    @rule(pick=number)
    def unpin(self, pick: int) -> None:
        self.steps.unpin(pick)

    @precondition(lambda self: self.world.regions)
    @rule(pick=number, first=number, count=number, ragged=st.integers(0, 3))
    def evict(self, pick: int, first: int, count: int, ragged: int) -> None:
        self.steps.evict(pick, first, count, ragged)

    @precondition(lambda self: self.world.regions)
    @rule(pick=number, first=number, count=number, ragged=st.integers(0, 3))
    def locate(self, pick: int, first: int, count: int, ragged: int) -> None:
        self.steps.locate(pick, first, count, ragged)

    @precondition(lambda self: self.world.regions)
    @rule(pick=number, first=number, count=number, ragged=st.integers(0, 3))
    def prefetch(self, pick: int, first: int, count: int, ragged: int) -> None:
        self.steps.prefetch(pick, first, count, ragged)

    @precondition(lambda self: self.world.regions)
    @rule()
    def flush(self) -> None:
        self.steps.flush()

    @rule(link_mask=st.integers(0, 0x1FF))
    def take(self, link_mask: int) -> None:
        self.steps.take(link_mask)

    @rule(count=st.integers(1, 4))
    def take_several(self, count: int) -> None:
        for _ in range(count):
            self.steps.take(0)

    @precondition(lambda self: self.world.flights)
    @rule(pick=number)
    def finish(self, pick: int) -> None:
        self.steps.finish(pick, False)

    @precondition(lambda self: self.world.flights)
    @rule(pick=number)
    def fail(self, pick: int) -> None:
        self.steps.finish(pick, True)

    @rule()
    def drain(self) -> None:
        self.steps.drain()

    @rule(backlog=st.integers(1, 4))
    def look_ahead(self, backlog: int) -> None:
        self.world.log.append(f"core.look_ahead({backlog})")
        self.world.core.look_ahead(backlog)

    @rule()
    def reset_counters(self) -> None:
        self.steps.reset_counters()

    @invariant()
    def nothing_is_wrong(self) -> None:
        if self.world is not None:
            self.world.verify()

    def teardown(self) -> None:
        if self.world is not None:
            close(self.world)


def shapes(
    hosts: st.SearchStrategy[int], flashes: st.SearchStrategy[int]
) -> st.SearchStrategy[Shape]:
    """Tight device tiers; 24 means a frame for each virtual page."""
    policies = st.sampled_from(["lru", "lookahead"])
    return st.builds(
        Shape, st.integers(2, 12), hosts, flashes, st.integers(1, 8), policy=policies
    )


none = st.just(0)
tight_host = st.integers(1, 8)
tight_or_ample = st.one_of(st.just(24), st.integers(1, 12))


class DeviceFlashMachine(CoreMachine):
    shapes = shapes(none, tight_or_ample)


class DeviceHostMachine(CoreMachine):
    shapes = shapes(tight_or_ample, none)


class ThreeTierMachine(CoreMachine):
    shapes = shapes(tight_host, tight_or_ample)


TestDeviceFlash = DeviceFlashMachine.TestCase
TestDeviceHost = DeviceHostMachine.TestCase
TestThreeTiers = ThreeTierMachine.TestCase
