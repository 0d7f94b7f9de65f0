# SPDX-License-Identifier: Apache-2.0
"""Contiguity: fragmentation alone never makes a pin fail, except around held windows.

`World.start` compares each answer with a brute-force search for a place; these tests bring the core
into the situations where that is hard.
"""

from __future__ import annotations

from core_drive import close, drain
from core_model import PAGE_BYTES, Shape, pages_of, whole
from core_placement import pack, placeable
from core_world import World
from hypothesis import given
from hypothesis import strategies as st

from pagert._core import core as c

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=12)
modes = st.sampled_from([c.READ, c.UPDATE, c.OVERWRITE])


def scatter(world: World, lengths: list[int], mode: int) -> list:
    """Regions that are resident side by side, as far as they fit."""
    regions = []
    used = 0
    for length in lengths:
        if used + length > world.shape.device:
            break
        region = world.reserve(length * PAGE_BYTES)
        pin = world.start([whole(region, mode)])
        drain(world)
        assert pin.granted
        world.unpin(pin)
        regions.append(region)
        used += length
    return regions


@given(
    device=st.integers(2, 12),
    lengths=sizes,
    gone=st.sets(st.integers(0, 11)),
    mode=modes,
    joined=st.integers(1, 4),
    data=st.data(),
)
def test_without_held_windows_every_pin_that_fits_is_placed(
    device: int, lengths: list[int], gone: set[int], mode: int, joined: int, data: st.DataObject
) -> None:
    world = World(Shape(device, 0, 40, joined, 40))
    regions = scatter(world, lengths, mode)
    for index in sorted(gone, reverse=True):
        if index < len(regions):
            world.release(regions.pop(index))
    count = data.draw(st.integers(1, device), label="pages")
    region = world.reserve(count * PAGE_BYTES)
    pin = world.start([whole(region, c.UPDATE)])
    assert pin is not None
    drain(world)
    assert pin.granted
    close(world)


@given(device=st.integers(2, 12), lengths=sizes, mode=modes, data=st.data())
def test_without_held_windows_several_accesses_that_fit_are_placed(
    device: int, lengths: list[int], mode: int, data: st.DataObject
) -> None:
    world = World(Shape(device, 0, 40, 2, 40))
    regions = scatter(world, lengths, mode)
    left = device
    accesses = []
    for region in data.draw(st.permutations(regions), label="order"):
        if left == 0:
            break
        count = data.draw(st.integers(1, min(left, region.page_count)), label="count")
        first = data.draw(st.integers(0, region.page_count - count), label="first")
        accesses.append(pages_of(region, first, count, c.UPDATE))
        left -= count
    if left:
        fresh = world.reserve(left * PAGE_BYTES)
        accesses.append(whole(fresh, c.UPDATE))
    pin = world.start(accesses)
    assert pin is not None
    drain(world)
    assert pin.granted
    close(world)


@given(
    device=st.integers(3, 12),
    lengths=sizes,
    held=st.sets(st.integers(0, 11), min_size=1),
    data=st.data(),
)
def test_around_held_windows_a_pin_is_placed_exactly_if_some_place_exists(
    device: int, lengths: list[int], held: set[int], data: st.DataObject
) -> None:
    world = World(Shape(device, 0, 40, 2, 40))
    regions = scatter(world, lengths, c.UPDATE)
    for index in held:
        if index < len(regions):
            region = regions[index]
            first = data.draw(st.integers(0, region.page_count - 1), label="first held page")
            count = data.draw(st.integers(1, region.page_count - first), label="held pages")
            assert world.start([pages_of(region, first, count)]).granted
    count = data.draw(st.integers(1, device), label="pages")
    region = world.reserve(count * PAGE_BYTES)
    possible = placeable(device, world.held_frames(), [(region.first, region.first + count)])
    pin = world.start([whole(region, c.UPDATE)])
    assert (pin is not None) == possible
    drain(world)
    assert pin is None or pin.granted
    close(world)


@given(
    device=st.integers(3, 10),
    before=st.integers(0, 4),
    size=st.integers(2, 6),
    data=st.data(),
)
def test_a_held_window_is_extended_where_it_lies_or_not_at_all(
    device: int, before: int, size: int, data: st.DataObject
) -> None:
    """A pin that reaches over both ends of a window that another pin holds."""
    world = World(Shape(device, 0, 40, 2, 40))
    scatter(world, [1] * min(before, device - 1), c.UPDATE)
    region = world.reserve(size * PAGE_BYTES)
    first = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, min(size - first, device)))
    inner = world.start([pages_of(region, first, count, c.UPDATE)])
    drain(world)
    assert inner is not None and inner.granted
    outer = (region.first, region.first + size)
    possible = placeable(device, world.held_frames(), [outer])
    pin = world.start([whole(region)])
    assert (pin is not None) == possible
    drain(world)
    assert pin is None or pin.granted
    close(world)


@given(
    device=st.integers(2, 10),
    size=st.integers(1, 10),
    data=st.data(),
)
def test_accesses_to_the_same_pages_are_one_window(
    device: int, size: int, data: st.DataObject
) -> None:
    world = World(Shape(device, 0, 40, 2, 40))
    region = world.reserve(size * PAGE_BYTES)
    accesses = []
    for _ in range(data.draw(st.integers(2, 3))):
        first = data.draw(st.integers(0, size - 1))
        count = data.draw(st.integers(1, size - first))
        accesses.append(pages_of(region, first, count, data.draw(modes)))
    ranges = [(access.pages.start, access.pages.stop) for access in accesses]
    possible = placeable(device, {}, ranges)
    pin = world.start(accesses)
    assert (pin is not None) == possible
    drain(world)
    assert pin is None or pin.granted
    close(world)


def test_the_search_for_a_place_is_right() -> None:
    assert pack([2, 2], [4]) and pack([3, 2, 2], [4, 3]) and not pack([3, 3], [5])
    assert not pack([1], [])
    assert placeable(4, {7: 1}, [(0, 2)]) and not placeable(4, {7: 1}, [(0, 3)])
    assert placeable(4, {7: 1}, [(6, 9)]) and not placeable(4, {7: 0}, [(6, 9)])
    assert not placeable(6, {6: 0, 8: 5}, [(6, 9)])
    assert placeable(3, {}, [(0, 2), (1, 3)]) and not placeable(2, {}, [(0, 2), (1, 3)])
