# SPDX-License-Identifier: Apache-2.0
"""Ways to drive a `World`: to rest, and to its end."""

from __future__ import annotations

from core_model import pages_of
from core_world import World

from pagert._core import core as c


def drain(world: World, result: int = 0) -> None:
    """Carry out everything, with this result, until nothing is left to do. Failed pins are let go of.

    No pin may wait then: nobody would ever wake it.
    """
    budget = 100 * (world.shape.page_count + sum(world.shape.frames))
    while True:
        progress = False
        while world.take() is not None:
            progress = True
            budget -= 1
            world.claim(budget > 0, "transfers without end")
        while world.flights:
            world.finish(world.flights[0], result)
            progress = True
        for pin in world.pending:
            was_idle = world.core.is_idle
            world.poll(pin)
            progress |= pin.granted or not world.core.is_idle or not was_idle
        for pin in list(world.pins):
            if pin.failed:
                world.unpin(pin)
                progress = True
        if not progress:
            break
    world.verify()
    waiting = [pin.name for pin in world.pending]
    world.claim(not waiting, waiting, "could go on or fail, but nothing moves")
    world.claim(world.core.is_idle, "the core is not idle, with nothing left to do")
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
    drain(world)
    while world.pins:
        ready = world.granted
        world.claim(ready, "no pin is ready, none will be", [pin.name for pin in world.pins])
        for pin in ready:
            world.unpin(pin)
        drain(world)


def read_back(world: World) -> None:
    """Read every page of every region, one by one; each must be what was last written."""
    for region in list(world.regions):
        for index in range(region.page_count):
            pin = world.start([pages_of(region, index, 1)])
            if pin is None:
                continue
            drain(world)
            if pin.granted:
                world.unpin(pin)
    drain(world)


def close(world: World) -> None:
    """End in good order, and prove that nothing was lost and nothing leaks."""
    let_go(world)
    read_back(world)
    flush_everything(world)
    evict_everything(world)
    for region in list(world.regions):
        world.release(region)
        world.verify()
    drain(world)
    for tier in range(c.TIER_COUNT):
        world.claim(world.core.usage(tier).used_frames == 0, "tier", tier, "keeps frames")
    world.claim(world.core.reserved_pages == 0, "pages stay reserved")
    world.claim(world.core.held_frames == 0, "frames stay held")


def flush_everything(world: World) -> None:
    """Flush ends: everything is clean, or the tiers below are full."""
    for _ in range(world.shape.device + 2):
        if not world.flush():
            break
        drain(world)
    else:
        world.claim(False, "flush makes no progress")
    drain(world)


def evict_everything(world: World) -> None:
    """With no pin held, every range leaves the device within as many rounds as it has pages."""
    for region in list(world.regions):
        for _ in range(2 * region.page_count + 2):
            left = world.evict(pages_of(region, 0, region.page_count))
            drain(world)
            if not left:
                break
        else:
            world.claim(False, region.name, "does not leave the device")
