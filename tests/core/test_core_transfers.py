# SPDX-License-Identifier: Apache-2.0
"""Which bytes move, and which need not: one claim each, checked on tokens."""

from __future__ import annotations

import pytest
from core_drive import close, drain
from core_model import EIO, FETCHES, PAGE_BYTES, WRITEBACKS, Access, Range, Shape, pages_of, whole
from core_world import World

from pagert._core import core as c

TWO = Shape(device=4, host=0, flash=16, transfer_pages_max=4, page_count=16)
HOST = Shape(device=4, host=16, flash=0, transfer_pages_max=4, page_count=16)
THREE = Shape(device=4, host=4, flash=16, transfer_pages_max=4, page_count=16)

set_ups = pytest.mark.parametrize("shape", [TWO, HOST, THREE], ids=["flash", "host", "three"])


def use(world: World, *accesses: Access) -> None:
    """Pin, let the world carry everything out, write what the modes say, let go."""
    pin = world.start(accesses)
    assert pin is not None
    drain(world)
    assert pin.granted
    for page, use_ in pin.uses.items():
        if use_.writes:
            world.write(pin, page)
    world.unpin(pin)
    drain(world)


def push_out(world: World, region: Range) -> None:
    for _ in range(region.page_count + 1):
        if not world.evict(whole(region)):
            return
        drain(world)
    raise AssertionError("the region does not leave the device")


def carried(world: World, *links: int) -> int:
    return sum(world.moved[link] for link in links)


@set_ups
def test_pages_never_written_make_no_io(shape: Shape) -> None:
    world = World(shape)
    regions = [world.reserve(3 * PAGE_BYTES) for _ in range(4)]
    for _ in range(2):
        for region in regions:
            use(world, whole(region))
    assert carried(world, *FETCHES, *WRITEBACKS) == 0
    assert carried(world, c.FILL) > 0
    close(world)


@set_ups
def test_overwritten_pages_are_neither_fetched_nor_filled(shape: Shape) -> None:
    world = World(shape)
    regions = [world.reserve(3 * PAGE_BYTES - 8) for _ in range(4)]
    for _ in range(3):
        for region in regions:
            use(world, whole(region, c.OVERWRITE))
    assert carried(world, c.FILL, c.HOST_TO_DEVICE, c.FLASH_TO_DEVICE, c.FLASH_TO_HOST) == 0
    close(world)


@set_ups
def test_partly_overwritten_pages_keep_their_other_bytes(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(3 * PAGE_BYTES)
    use(world, whole(region, c.UPDATE))
    push_out(world, region)
    before = carried(world, c.HOST_TO_DEVICE, c.FLASH_TO_DEVICE)
    use(world, Access(region, 100, 3 * PAGE_BYTES - 200, c.OVERWRITE))
    assert carried(world, c.HOST_TO_DEVICE, c.FLASH_TO_DEVICE) == before + 2
    close(world)


@set_ups
def test_clean_pages_are_never_written_again(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(4 * PAGE_BYTES)
    other = world.reserve(4 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    use(world, whole(other))
    written = carried(world, c.DEVICE_TO_HOST, c.DEVICE_TO_FLASH)
    assert written == 4
    for _ in range(5):
        use(world, whole(region))
        use(world, whole(other))
    assert carried(world, c.DEVICE_TO_HOST, c.DEVICE_TO_FLASH) == written
    close(world)


@set_ups
def test_updated_pages_are_written_again_and_only_those(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(4 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    push_out(world, region)
    use(world, whole(region), pages_of(region, 2, 1, c.UPDATE))
    written = carried(world, c.DEVICE_TO_HOST, c.DEVICE_TO_FLASH)
    push_out(world, region)
    assert carried(world, c.DEVICE_TO_HOST, c.DEVICE_TO_FLASH) == written + 1
    close(world)


def test_neighbouring_pages_share_a_transfer() -> None:
    world = World(Shape(device=8, host=0, flash=16, transfer_pages_max=4, page_count=16))
    region = world.reserve(8 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    push_out(world, region)
    use(world, whole(region))
    assert world.moved[c.DEVICE_TO_FLASH] == world.moved[c.FLASH_TO_DEVICE] == 8
    assert world.moves[c.DEVICE_TO_FLASH] == 2
    assert world.moves[c.FLASH_TO_DEVICE] == 2
    close(world)


def test_independent_fetches_are_in_flight_at_once() -> None:
    world = World(Shape(device=8, host=0, flash=16, transfer_pages_max=1, page_count=16))
    regions = [world.reserve(PAGE_BYTES) for _ in range(8)]
    for region in regions:
        use(world, whole(region, c.OVERWRITE))
        push_out(world, region)
    pin = world.start([whole(region) for region in regions])
    assert pin is not None
    assert sum(world.take() is not None for _ in regions) == 8
    drain(world)
    close(world)


def test_a_fetch_does_not_wait_for_writebacks_it_does_not_need() -> None:
    world = World(Shape(device=4, host=0, flash=16, transfer_pages_max=1, page_count=16))
    wanted = world.reserve(2 * PAGE_BYTES)
    use(world, whole(wanted, c.OVERWRITE))
    push_out(world, wanted)
    dirty = [world.reserve(PAGE_BYTES) for _ in range(3)]
    for region in dirty:
        use(world, whole(region, c.OVERWRITE))
    pin = world.start([whole(wanted)])
    assert pin is not None and not pin.granted
    links = []
    while (flight := world.take()) is not None:
        links.append(flight.transfer.link)
        if flight.transfer.link in WRITEBACKS:
            continue
        world.finish(flight)
    # One of the two frames is free already; whatever the placement, one writeback is enough.
    assert links.count(c.DEVICE_TO_FLASH) == 1
    drain(world)
    assert pin.granted
    close(world)


def test_second_stage_starts_while_the_first_goes_on() -> None:
    world = World(Shape(device=4, host=4, flash=16, transfer_pages_max=1, page_count=16))
    region = world.reserve(3 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    push_out(world, region)
    for _ in range(3):
        use(world, whole(world.reserve(4 * PAGE_BYTES), c.OVERWRITE))
    assert world.core.locate(region.handle, 0, region.size_bytes).flash == 3
    pin = world.start([whole(region)])
    first_stage = []
    for _ in range(200):
        flight = world.take()
        if flight is None:
            assert world.flights, "nothing is in flight and nothing is ready"
            world.finish(first_stage[0] if len(first_stage) == 3 else world.flights[0])
            if len(first_stage) == 3:
                break
        elif flight.transfer.link == c.FLASH_TO_HOST:
            first_stage.append(flight)
        else:
            world.finish(flight)
    flight = world.take()
    assert flight is not None and flight.transfer.link == c.HOST_TO_DEVICE
    drain(world)
    assert pin.granted
    close(world)


@set_ups
def test_only_links_in_the_mask_are_handed_out(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(4 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    down = c.DEVICE_TO_HOST if shape.host else c.DEVICE_TO_FLASH
    assert world.evict(whole(region)) == 4
    assert world.take(c.ALL_LINKS & ~(1 << down)) is None
    assert world.take(0) is None
    assert world.take(1 << down) is not None
    drain(world)
    close(world)


@set_ups
def test_failed_writeback_keeps_the_page_dirty_where_it_is(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(2 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    world.evict(whole(region))
    while (flight := world.take()) is not None:
        world.finish(flight, EIO)
        world.verify()
        break
    for page in flight.pages:
        info = world.core.page(page)
        assert info.dirty and info.frame[c.DEVICE] != c.NONE
    push_out(world, region)
    use(world, whole(region))
    close(world)


@set_ups
def test_failed_fetch_fails_the_pin_and_says_which(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(2 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    push_out(world, region)
    pin = world.start([whole(region)])
    flight = world.take()
    world.finish(flight, -61)
    while (other := world.take()) is not None:
        world.finish(other)
    world.poll(pin)
    assert pin.failed
    with pytest.raises(c.CoreError) as caught:
        pin.core_pin.poll()
    assert caught.value.code == c.E_TRANSFER
    assert caught.value.failure.page in flight.pages
    assert caught.value.failure[1:] == (flight.transfer.link, -61)
    world.unpin(pin)
    use(world, whole(region))
    close(world)


def test_failed_fill_leaves_the_page_zero() -> None:
    world = World(TWO)
    region = world.reserve(PAGE_BYTES)
    pin = world.start([whole(region)])
    world.finish(world.take(), EIO)
    world.poll(pin)
    assert pin.failed
    world.unpin(pin)
    drain(world)
    assert world.core.page(region.first).state == c.ZERO
    use(world, whole(region, c.UPDATE))
    close(world)


@set_ups
def test_writebacks_that_always_fail_end_in_a_failed_pin(shape: Shape) -> None:
    world = World(shape)
    dirty = world.reserve(4 * PAGE_BYTES)
    other = world.reserve(2 * PAGE_BYTES)
    use(world, whole(dirty, c.OVERWRITE))
    pin = world.start([whole(other)])
    for _ in range(100):
        flight = world.take()
        if flight is None:
            break
        world.finish(flight, EIO)
        world.verify()
    else:
        raise AssertionError("the core tries a failing writeback without end")
    world.poll(pin)
    assert pin.failed
    world.unpin(pin)
    use(world, whole(other))
    use(world, whole(dirty))
    close(world)


@set_ups
def test_overwrite_that_never_became_ready_loses_nothing(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(2 * PAGE_BYTES)
    other = world.reserve(2 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    use(world, whole(other, c.OVERWRITE))
    push_out(world, other)
    push_out(world, region)
    pin = world.start([whole(region, c.OVERWRITE), whole(other)])
    assert pin is not None and not pin.granted
    world.verify()
    world.unpin(pin)
    drain(world)
    use(world, whole(region))
    pin = world.start([whole(region, c.OVERWRITE), whole(other)])
    if not pin.granted:
        world.finish(world.take(), EIO)
        world.poll(pin)
        world.verify()
    world.unpin(pin)
    drain(world)
    use(world, whole(region))
    close(world)


@set_ups
def test_update_waits_for_a_writeback_in_flight_and_a_read_does_not(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    assert world.flush() == 1
    flight = world.take()
    reader = world.start([whole(region)])
    assert reader.granted
    writer = world.start([whole(region, c.UPDATE)])
    assert not writer.granted
    world.finish(flight)
    world.poll(writer)
    assert writer.granted
    world.write(writer, region.first)
    close(world)


def test_released_pages_are_free_once_their_transfers_ended() -> None:
    world = World(TWO)
    region = world.reserve(2 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    world.evict(whole(region))
    flight = world.take()
    assert world.release(region)
    assert world.core.reserved_pages == 0
    world.verify()
    newer = world.reserve(2 * PAGE_BYTES)
    use(world, whole(newer, c.OVERWRITE))
    world.finish(flight) if flight in world.flights else None
    drain(world)
    close(world)


@set_ups
def test_pages_unpinned_while_they_are_fetched_arrive_and_stay(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(2 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    push_out(world, region)
    pin = world.start([whole(region)])
    world.take()
    world.unpin(pin)
    drain(world)
    fetched = carried(world, *FETCHES)
    assert fetched >= 2
    use(world, whole(region))
    assert carried(world, *FETCHES) == fetched
    close(world)


@set_ups
def test_flush_makes_all_clean_and_keeps_it_resident(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(4 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    for _ in range(6):
        if world.flush() == 0:
            break
        drain(world)
    assert world.flush() == 0
    assert world.core.locate(region.handle, 0, region.size_bytes).device == 4
    moved = sum(world.moved)
    world.evict(whole(region))
    drain(world)
    assert sum(world.moved) == moved
    close(world)


@set_ups
def test_failed_flush_is_told_to_the_next_call(shape: Shape) -> None:
    world = World(shape)
    region = world.reserve(PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    assert world.flush() == 1
    flight = world.take()
    world.finish(flight, -28)
    with pytest.raises(c.CoreError) as caught:
        world.core.flush()
    assert caught.value.code == c.E_TRANSFER
    assert caught.value.failure == (region.first, flight.transfer.link, -28)
    drain(world)
    for _ in range(4):
        if world.flush() == 0:
            break
        drain(world)
    assert not world.core.page(region.first).dirty
    close(world)


def test_peaks_and_counters_follow_what_happened() -> None:
    world = World(TWO)
    region = world.reserve(4 * PAGE_BYTES)
    use(world, whole(region, c.OVERWRITE))
    use(world, whole(region))
    assert world.core.counters()[:2] == (4, 4)
    push_out(world, region)
    assert world.core.usage(c.DEVICE) == (4, 0, 4)
    assert world.core.usage(c.FLASH) == (16, 4, 4)
    world.reset_counters()
    assert world.core.usage(c.DEVICE) == (4, 0, 0)
    assert world.core.counters()[:2] == (0, 0)
    close(world)
