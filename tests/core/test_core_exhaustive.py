# SPDX-License-Identifier: Apache-2.0
"""Every sequence of a few operations on a core so small that all its corners are near.

A sequence's prefixes are sequences too, so only the end of each is looked at as a whole; the
world's own claims on each call hold on the way.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping

import pytest
from core_drive import drain, let_go
from core_model import EIO, PAGE_BYTES, Shape, pages_of, whole
from core_world import World

from pagert._core import core as c

DEEPER = int(os.environ.get("PAGERT_TEST_PROFILE") == "long")
Operation = Callable[[World], None]

TINY = {
    "flash": Shape(2, 0, 4, 2, 4),
    "tight flash": Shape(3, 0, 1, 2, 4),
    "host": Shape(3, 2, 0, 1, 4),
    "three": Shape(2, 1, 2, 2, 4),
}
tiny = pytest.mark.parametrize("shape", TINY.values(), ids=TINY.keys())


def at_once(which: int, first: int, count: int, mode: int) -> Operation:
    """Pin, wait until it is ready, write if the mode says so, unpin."""

    def operation(world: World) -> None:
        pin = world.start([pages_of(world.regions[which], first, count, mode)])
        if pin is None:
            return
        drain(world)
        if pin.granted:
            for page, use in pin.uses.items():
                if use.writes:
                    world.write(pin, page)
            world.unpin(pin)

    return operation


def hold(which: int, first: int, count: int, mode: int) -> Operation:
    """Pin and leave it to others to carry out."""

    def operation(world: World) -> None:
        if len(world.pins) < 3:
            world.start([pages_of(world.regions[which], first, count, mode)])

    return operation


def hold_both(world: World) -> None:
    if len(world.pins) < 3:
        world.start([whole(world.regions[0]), pages_of(world.regions[1], 0, 1, c.UPDATE)])


def evict(which: int) -> Operation:
    return lambda world: world.evict(whole(world.regions[which])) and None


def renew(which: int) -> Operation:
    """Release a region and reserve another one in its place."""

    def operation(world: World) -> None:
        region = world.regions[which]
        if world.release(region):
            again = world.reserve(region.size_bytes)
            if again is None:  # its pages are still on the way; they come free when all is done
                drain(world)
                again = world.reserve(region.size_bytes)
            assert again is not None
            world.regions.remove(again)
            world.regions.insert(which, again)

    return operation


def unpin(index: int) -> Operation:
    return lambda world: world.unpin(world.pins[index]) if world.pins else None


def finish(index: int, result: int = 0) -> Operation:
    def operation(world: World) -> None:
        if world.flights:
            world.finish(world.flights[index], result)
            for pin in world.pending:
                world.poll(pin)

    return operation


def flush(world: World) -> None:
    world.flush()


def take(world: World) -> None:
    world.take()


WHOLE = {
    "A0 read": at_once(0, 0, 1, c.READ),
    "A1 update": at_once(0, 1, 1, c.UPDATE),
    "A overwrite": at_once(0, 0, 2, c.OVERWRITE),
    "A read": at_once(0, 0, 2, c.READ),
    "B read": at_once(1, 0, 2, c.READ),
    "B0 overwrite": at_once(1, 0, 1, c.OVERWRITE),
    "B update": at_once(1, 0, 2, c.UPDATE),
    "evict A": evict(0),
    "flush": flush,
    "renew B": renew(1),
}
HELD = {
    "hold A0 read": hold(0, 0, 1, c.READ),
    "hold A1 update": hold(0, 1, 1, c.UPDATE),
    "hold A overwrite": hold(0, 0, 2, c.OVERWRITE),
    "hold B1 update": hold(1, 1, 1, c.UPDATE),
    "hold both": hold_both,
    "drain": drain,
    "unpin oldest": unpin(0),
    "unpin newest": unpin(-1),
    "renew A": renew(0),
}
LATE = {
    "hold A overwrite": hold(0, 0, 2, c.OVERWRITE),
    "hold A1 update": hold(0, 1, 1, c.UPDATE),
    "hold B read": hold(1, 0, 2, c.READ),
    "take": take,
    "finish oldest": finish(0),
    "fail newest": finish(-1, EIO),
    "unpin oldest": unpin(0),
    "renew A": renew(0),
}


def run_all(shape: Shape, operations: Mapping[str, Operation], depth: int, written: bool) -> None:
    """Run every sequence of `depth` operations; `written`: on regions that were written before."""
    for names in itertools.product(operations, repeat=depth):
        world = World(shape)
        for _ in range(2):
            world.reserve(2 * PAGE_BYTES)
        if written:
            for which in range(2):
                at_once(which, 0, 2, c.OVERWRITE)(world)
        for name in names:
            world.note(f"# {name}")
            operations[name](world)
        world.verify()
        let_go(world)


@tiny
@pytest.mark.parametrize("written", [False, True], ids=["zero", "written"])
def test_all_sequences_of_whole_operations(shape: Shape, written: bool) -> None:
    run_all(shape, WHOLE, 3 + DEEPER, written)


@tiny
def test_all_sequences_with_held_pins(shape: Shape) -> None:
    run_all(shape, HELD, 4 + DEEPER, written=True)


@tiny
def test_all_sequences_with_late_and_failing_transfers(shape: Shape) -> None:
    run_all(shape, LATE, 4 + 2 * DEEPER, written=True)
