# SPDX-License-Identifier: Apache-2.0
"""What random walks and exhaustive search once found, as the shortest calls that showed it."""

from __future__ import annotations

import pytest
from core_drive import close, drain, let_go
from core_model import EIO, PAGE_BYTES, Access, Shape, pages_of, whole
from core_world import World

from pagert._core import core as c


def test_reading_and_overwriting_one_page_in_one_pin_sees_its_bytes() -> None:
    """`torch.add(a, b, out=a)`: the page must be brought although it will be overwritten."""
    for modes in ((c.READ, c.OVERWRITE), (c.OVERWRITE, c.READ), (c.OVERWRITE, c.UPDATE)):
        world = World(Shape(device=3, host=0, flash=8, page_count=8))
        region = world.reserve(PAGE_BYTES)
        pin = world.start([whole(region, mode) for mode in modes])
        drain(world)
        assert pin.granted
        close(world)


def test_page_that_waits_for_an_overwrite_is_not_shown_to_a_reader() -> None:
    world = World(Shape(device=3, host=8, flash=0, page_count=8))
    region = world.reserve(2 * PAGE_BYTES)
    other = world.reserve(PAGE_BYTES)
    world.start([whole(region), whole(other, c.OVERWRITE)])
    world.start([whole(other)])
    drain(world)
    close(world)


def test_held_pages_are_not_moved_for_a_pin_that_waits() -> None:
    world = World(Shape(device=8, host=2, flash=10, transfer_pages_max=8, page_count=10))
    region = world.reserve(3 * PAGE_BYTES)
    first = world.start([pages_of(region, 1, 1, c.UPDATE)])
    world.start([pages_of(region, 0, 2, c.OVERWRITE), pages_of(region, 1, 2, c.UPDATE)])
    world.finish(world.take())
    world.poll(first)
    assert first.granted
    drain(world)
    close(world)


def test_window_grows_over_pages_that_a_released_pin_was_fetching() -> None:
    world = World(Shape(device=11, host=24, flash=0, transfer_pages_max=8, page_count=24))
    region = world.reserve(9 * PAGE_BYTES)
    world.unpin(world.start([pages_of(region, 3, 5)]))
    pin = world.start([pages_of(region, 2, 7, c.UPDATE)])
    drain(world)
    assert pin.granted
    close(world)


def test_moves_of_several_windows_do_not_wait_for_each_other() -> None:
    world = World(Shape(device=8, host=0, flash=40, transfer_pages_max=2, page_count=40))
    regions = []
    for length in (2, 3, 3):
        regions.append(world.reserve(length * PAGE_BYTES))
        world.start([whole(regions[-1])])
        let_go(world)
    last = world.reserve(3 * PAGE_BYTES)
    pin = world.start(
        [
            whole(regions[2], c.UPDATE),
            pages_of(regions[0], 0, 1, c.UPDATE),
            pages_of(regions[1], 0, 1, c.UPDATE),
            whole(last, c.UPDATE),
        ]
    )
    drain(world)
    assert pin.granted
    close(world)


def test_pin_goes_on_after_another_pin_of_its_page_failed() -> None:
    world = World(Shape(device=6, host=17, flash=0, page_count=17))
    region = world.reserve(PAGE_BYTES)
    first = world.start([whole(region, c.UPDATE)])
    world.finish(world.take(), EIO)
    second = world.start([whole(region)])
    world.poll(first)
    assert first.failed
    world.unpin(first)
    drain(world)
    assert second not in world.pins or second.granted
    close(world)


def test_start_refuses_at_once_what_held_windows_leave_no_place_for() -> None:
    world = World(Shape(device=3, host=0, flash=16, page_count=16))
    region = world.reserve(2 * PAGE_BYTES)
    world.start([whole(region, c.UPDATE)])
    drain(world)
    world.start([pages_of(region, 1, 1)])
    world.unpin(world.pins[0])
    assert world.start([whole(world.reserve(2 * PAGE_BYTES))]) is None
    moved = list(world.moved)
    drain(world)
    assert world.moved == moved, "the refused pin moved bytes"
    close(world)


def test_pin_larger_than_the_device_is_refused_though_others_wait() -> None:
    world = World(Shape(device=5, host=0, flash=23, transfer_pages_max=3, page_count=23))
    region = world.reserve(7 * PAGE_BYTES)
    world.unpin(world.start([pages_of(region, 4, 3, c.OVERWRITE)]))
    world.start([pages_of(region, 0, 4, c.OVERWRITE)])
    assert world.start([whole(region, c.OVERWRITE)]) is None
    drain(world)
    close(world)


def test_region_is_not_released_while_a_pin_waits_to_be_placed() -> None:
    world = World(Shape(device=8, host=23, flash=0, transfer_pages_max=6, page_count=23))
    region = world.reserve(10 * PAGE_BYTES)
    world.unpin(world.start([Access(region, 16484, 3996, c.UPDATE)]))
    pin = world.start([pages_of(region, 9, 1), pages_of(region, 3, 7)])
    assert not world.release(region)
    drain(world)
    assert pin.granted
    close(world)


def test_failed_writeback_names_the_page_that_failed() -> None:
    world = World(Shape(device=2, host=6, flash=0, page_count=13))
    region = world.reserve(3 * PAGE_BYTES)
    world.unpin(world.start([pages_of(region, 0, 2, c.OVERWRITE)]))
    pin = world.start([pages_of(region, 2, 1)])
    flight = world.take()
    world.finish(flight, EIO)
    world.poll(pin)  # names another page: a violation
    drain(world)
    close(world)


def test_failed_flush_does_not_refuse_a_later_pin() -> None:
    world = World(Shape(device=5, host=0, flash=13, page_count=13))
    region = world.reserve(3 * PAGE_BYTES)
    world.unpin(world.start([pages_of(region, 1, 1, c.OVERWRITE)]))
    world.flush()
    world.finish(world.take(), EIO)
    pin = world.start([whole(region, c.UPDATE)])
    drain(world)
    assert pin.granted
    close(world)


def test_flush_into_a_full_tier_ends() -> None:
    """Writing a dirty page over the only copy of a clean one makes that one dirty: no progress."""
    world = World(Shape(device=3, host=0, flash=1, page_count=8))
    region = world.reserve(2 * PAGE_BYTES)
    world.unpin(world.start([whole(region, c.OVERWRITE)]))
    for _ in range(6):
        left = world.flush()
        drain(world)
    assert left is None, "flush neither ends nor says that the tier is full"
    assert world.moved[c.DEVICE_TO_FLASH] == 1
    close(world)


def test_writeback_of_one_page_goes_on_when_another_is_pinned() -> None:
    world = World(Shape(device=2, host=1, flash=2, transfer_pages_max=2, page_count=4))
    region = world.reserve(2 * PAGE_BYTES)
    world.unpin(world.start([whole(region, c.OVERWRITE)]))
    world.flush()
    world.start([pages_of(region, 0, 1, c.OVERWRITE)])
    let_go(world)
    close(world)


@pytest.mark.parametrize("fresh_bytes", [PAGE_BYTES, 2 * PAGE_BYTES])
def test_evict_does_not_tell_of_a_failure_that_is_not_its_own(fresh_bytes: int) -> None:
    world = World(Shape(device=4, host=1, flash=0, page_count=24))
    region = world.reserve(2 * PAGE_BYTES)
    world.unpin(world.start([whole(region, c.OVERWRITE)]))
    world.evict(whole(region))
    drain(world)
    world.release(region)
    other = world.reserve(fresh_bytes)
    world.start([whole(other)])
    let_go(world)
    assert world.evict(whole(other)) == 0
    close(world)


def test_pin_goes_on_or_fails_after_one_before_it_found_the_tiers_full() -> None:
    world = World(Shape(device=3, host=2, flash=0, page_count=4))
    first, second = world.reserve(2 * PAGE_BYTES), world.reserve(2 * PAGE_BYTES)
    for region in (first, second):
        pin = world.start([whole(region, c.OVERWRITE)])
        drain(world)
        world.unpin(pin)
    reader = world.start([pages_of(first, 0, 1)])
    for _ in range(2):
        world.start([whole(first, c.OVERWRITE)])
    world.unpin(reader)
    let_go(world)
    close(world)


def test_pins_that_fail_do_not_count_as_faults() -> None:
    world = World(Shape(device=2, host=1, flash=0, page_count=8))
    region = world.reserve(4 * PAGE_BYTES)
    world.unpin(world.start([pages_of(region, 0, 2, c.OVERWRITE)]))
    pin = world.start([pages_of(region, 2, 2, c.OVERWRITE)])
    drain(world)
    assert pin is None or pin.failed
    assert world.core.counters().faults == 2
    close(world)


def test_region_of_a_pin_that_was_refused_late_is_released_after_it_is_let_go_of() -> None:
    world = World(Shape(device=4, host=0, flash=4, page_count=23))
    region, other = world.reserve(4 * PAGE_BYTES), world.reserve(3 * PAGE_BYTES)
    world.prefetch(pages_of(region, 1, 3))
    for _ in range(2):
        world.take()
    pin = world.start([whole(other, c.UPDATE), pages_of(region, 3, 1, c.UPDATE)])
    assert world.start([pages_of(region, 0, 1, c.OVERWRITE)]).granted
    world.poll(pin)
    assert pin.failed
    assert not world.release(other)
    world.unpin(pin)
    assert world.release(other)
    let_go(world)
    close(world)


def test_pin_is_told_that_the_tiers_are_full_though_no_page_was_to_come_yet() -> None:
    """Each attempt evicted one more page that nothing below could take: without end, in one call."""
    world = World(Shape(device=4, host=1, flash=0, page_count=22))
    region = world.reserve(6 * PAGE_BYTES)
    world.unpin(world.start([pages_of(region, 1, 3, c.OVERWRITE)]))
    world.start([whole(world.reserve(PAGE_BYTES), c.OVERWRITE)])
    pin = world.start([whole(world.reserve(PAGE_BYTES), c.OVERWRITE)])
    drain(world)
    world.unpin(pin)
    assert world.start([pages_of(region, 2, 3, c.OVERWRITE)]) is None
    let_go(world)
    close(world)


def test_pin_is_told_that_no_move_works() -> None:
    world = World(Shape(device=7, host=0, flash=1, transfer_pages_max=4, page_count=23))
    region, other = world.reserve(9 * PAGE_BYTES), world.reserve(PAGE_BYTES)
    world.prefetch(pages_of(region, 2, 7))
    first = world.take()
    pin = world.start(
        [pages_of(region, 8, 1), whole(other, c.OVERWRITE), pages_of(region, 1, 5, c.READ)]
    )
    world.finish(first)
    drain(world, EIO)
    assert pin not in world.pins
    close(world)


def test_page_that_a_pin_was_to_overwrite_may_fail_when_it_is_read_after_all() -> None:
    world = World(Shape(device=6, host=8, flash=0, page_count=8))
    shared, other, more = (world.reserve(PAGE_BYTES) for _ in range(3))
    first = world.start([whole(shared, c.OVERWRITE), whole(other)])
    second = world.start([whole(shared, c.OVERWRITE), whole(more)])
    reader = world.start([whole(shared)])
    world.unpin(first)
    while flight := world.take():
        world.finish(flight, EIO if flight.transfer.first_page == shared.first else 0)
    for pin in (second, reader):
        world.poll(pin)
        assert pin.failed
    drain(world)
    close(world)


def test_claim_to_overwrite_passes_to_the_next_pin_that_overwrites() -> None:
    world = World(Shape(device=6, host=8, flash=0, page_count=8))
    shared, other, more = (world.reserve(PAGE_BYTES) for _ in range(3))
    first = world.start([whole(shared, c.OVERWRITE), whole(other)])
    second = world.start([whole(shared, c.OVERWRITE), whole(more)])
    world.unpin(first)
    let_go(world)
    assert second.granted
    assert world.moved[c.FILL] == 2, "the page that is overwritten was filled"
    close(world)


def clean_between(world: World, outer: tuple[int, int]) -> None:
    """A clean page with a copy on the host, while a flush goes on, in the frame between two others.

    The outer pages get older than that one; they are used in these modes.
    """
    first, page, last = (world.reserve(PAGE_BYTES) for _ in range(3))
    pins = []
    for region, mode in ((first, c.READ), (page, c.OVERWRITE), (last, c.READ)):
        pins.append(world.start([whole(region, mode)]))
        drain(world)
    for pin in pins:
        world.unpin(pin)
    assert world.flush() == 1
    drain(world)
    for region, mode in ((first, outer[0]), (last, outer[1]), (page, c.READ)):
        world.unpin(world.start([whole(region, mode)]))


def test_page_on_the_move_has_a_host_frame_that_may_become_free() -> None:
    world = World(Shape(device=3, host=1, flash=8, page_count=8))
    region = world.reserve(2 * PAGE_BYTES)
    world.unpin(world.start([whole(region, c.OVERWRITE)]))
    for _ in range(2):
        world.evict(whole(region))
        drain(world)
    clean_between(world, (c.READ, c.READ))
    pin = world.start([whole(region)])
    drain(world)
    assert pin.granted
    close(world)


@pytest.mark.parametrize("failing", [0, 2])
def test_move_is_given_up_while_the_host_copy_leaves(failing: int) -> None:
    """A page waits for the frame of another one whose writeback fails."""
    world = World(Shape(device=3, host=2, flash=8, page_count=8))
    clean_between(world, (c.UPDATE, c.UPDATE))
    world.start([whole(world.reserve(2 * PAGE_BYTES))])
    leaving = world.take(1 << c.HOST_TO_FLASH)
    assert leaving.transfer.first_page == 1
    for _ in range(2):
        flight = world.take(1 << c.DEVICE_TO_HOST)
        if flight is not None:
            world.finish(flight, EIO)
    world.finish(leaving)
    let_go(world)
    close(world)


def test_failed_departure_from_the_host_names_its_own_page() -> None:
    world = World(Shape(device=2, host=1, flash=2, transfer_pages_max=2, page_count=4))
    first, second = world.reserve(2 * PAGE_BYTES), world.reserve(2 * PAGE_BYTES)
    for region in (first, second):
        pin = world.start([whole(region, c.OVERWRITE)])
        drain(world)
        world.unpin(pin)
    pin = world.start([whole(first, c.OVERWRITE)])
    flight = world.take(1 << c.HOST_TO_FLASH)
    world.finish(flight, EIO)
    world.poll(pin)  # names another page: a violation
    assert pin.failed
    let_go(world)
    close(world)
