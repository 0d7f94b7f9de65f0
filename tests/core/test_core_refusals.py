# SPDX-License-Identifier: Apache-2.0
"""What the core refuses, with which code, and that nothing is lost by it."""

from __future__ import annotations

import signal

import pytest
from core_apart import run_apart
from core_drive import close, drain
from core_model import PAGE_BYTES, Access, Range, Shape, pages_of, whole
from core_world import World

from pagert._core import core as c

TWO = Shape(device=4, host=0, flash=16, transfer_pages_max=4, page_count=16)

GOOD = {
    "page_bytes": 4096,
    "page_count": 16,
    "device_frames": 4,
    "host_frames": 0,
    "flash_frames": 16,
    "transfer_pages_max": 4,
}
BAD = {
    "page_bytes of 0": {"page_bytes": 0},
    "page_bytes below 4096": {"page_bytes": 2048},
    "page_bytes no power of two": {"page_bytes": 12288},
    "page_bytes so large that sizes overflow": {"page_bytes": 1 << 63},
    "no pages": {"page_count": 0},
    "too many pages": {"page_count": 2**32 - 1},
    "no device tier": {"device_frames": 0},
    "the device tier alone": {"flash_frames": 0},
    "too many frames": {"device_frames": 2**32 - 1},
    "no pages in a transfer": {"transfer_pages_max": 0},
}


def refused(code: int, call: object, *arguments: object) -> c.CoreError:
    with pytest.raises(c.CoreError) as caught:
        call(*arguments)
    assert caught.value.code == code, caught.value
    return caught.value


def written(world: World, page_count: int) -> Range:
    """A region that has been written and is not held."""
    region = world.reserve(page_count * PAGE_BYTES)
    pin = world.start([whole(region, c.OVERWRITE)])
    drain(world)
    assert pin.granted
    world.unpin(pin)
    drain(world)
    return region


def test_the_good_configuration_is_good() -> None:
    needed = c.memory_bytes(**GOOD)
    assert needed > 0
    assert c.Core(**GOOD, memory_bytes=needed).check() == 0
    assert c.Core(**GOOD, memory_bytes=needed + 64).check() == 0


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_bad_configurations_are_refused(change: dict[str, int]) -> None:
    config = GOOD | change
    assert c.memory_bytes(**config) == 0
    refused(c.E_ARGUMENT, lambda: c.Core(**config))
    refused(c.E_ARGUMENT, lambda: c.Core(**config, memory_bytes=1 << 20))


def test_too_little_memory_is_refused() -> None:
    needed = c.memory_bytes(**GOOD)
    for memory_bytes in (1, 64, needed // 2, needed - 1):
        refused(c.E_ARGUMENT, lambda size=memory_bytes: c.Core(**GOOD, memory_bytes=size))


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'lru'"):
        c.Core(**GOOD, policy="most recently frobnicated")


def test_region_of_no_bytes_is_refused() -> None:
    world = World(TWO)
    refused(c.E_ARGUMENT, world.core.reserve, 0)
    close(world)


@pytest.mark.parametrize("size_bytes", [17 * PAGE_BYTES, 1 << 40, 2**64 - 1])
def test_region_larger_than_the_address_space_is_refused(size_bytes: int) -> None:
    world = World(TWO)
    refused(c.E_PAGES, world.core.reserve, size_bytes)
    assert world.reserve(16 * PAGE_BYTES) is not None
    refused(c.E_PAGES, world.core.reserve, 1)
    close(world)


def test_released_pages_join_their_neighbours() -> None:
    world = World(TWO)
    regions = [world.reserve(4 * PAGE_BYTES) for _ in range(4)]
    for index in (1, 3, 2):
        world.release(regions[index])
    assert world.reserve(12 * PAGE_BYTES) is not None
    close(world)


def test_stale_handles_are_refused_everywhere() -> None:
    world = World(TWO)
    region = world.reserve(2 * PAGE_BYTES)
    world.release(region)
    again = world.reserve(2 * PAGE_BYTES)
    assert again.handle != region.handle
    forged = [
        region.handle,
        c.RegionHandle(region.first, again.handle.generation + 1),
        c.RegionHandle(again.first + 1, again.handle.generation),
        c.RegionHandle(15, 0),
        c.RegionHandle(16, again.handle.generation),
        c.RegionHandle(c.NONE, again.handle.generation),
    ]
    for handle in forged:
        refused(c.E_STALE, world.core.release, handle)
        refused(c.E_STALE, world.core.pin, [(handle, 0, 1, c.READ)])
        refused(c.E_STALE, world.core.evict, handle, 0, 1)
        refused(c.E_STALE, world.core.locate, handle, 0, 1)
        pair = [(again.handle, 0, PAGE_BYTES, c.READ), (handle, 0, 1, c.READ)]
        refused(c.E_STALE, world.core.pin, pair)
        assert world.core.held_frames == 0
        world.verify()
    close(world)


def test_generations_differ_over_many_lives() -> None:
    world = World(TWO)
    handles = set()
    for _ in range(1000):
        region = world.reserve(PAGE_BYTES)
        handles.add(region.handle)
        world.release(region)
    assert len(handles) == 1000


@pytest.mark.parametrize(
    ("offset_bytes", "size_bytes"),
    [
        (0, 0),
        (PAGE_BYTES, 0),
        (0, 2 * PAGE_BYTES + 1),
        (2 * PAGE_BYTES, 1),
        (PAGE_BYTES, PAGE_BYTES + 1),
        (2**64 - 1, 2),
        (1, 2**64 - 1),
        (PAGE_BYTES, 2**64 - PAGE_BYTES),
    ],
)
def test_ranges_outside_the_region_are_refused(offset_bytes: int, size_bytes: int) -> None:
    world = World(TWO)
    region = world.reserve(2 * PAGE_BYTES)
    handle = region.handle
    refused(c.E_ARGUMENT, world.core.pin, [(handle, offset_bytes, size_bytes, c.READ)])
    refused(c.E_ARGUMENT, world.core.evict, handle, offset_bytes, size_bytes)
    refused(c.E_ARGUMENT, world.core.locate, handle, offset_bytes, size_bytes)
    world.verify()
    close(world)


def test_pin_of_nothing_and_unknown_modes_are_refused() -> None:
    world = World(TWO)
    region = world.reserve(2 * PAGE_BYTES)
    refused(c.E_ARGUMENT, world.core.pin, [])
    for mode in (3, 0xFFFFFFFF):
        refused(c.E_ARGUMENT, world.core.pin, [(region.handle, 0, 1, mode)])
    world.verify()
    close(world)


def test_page_outside_the_address_space_is_refused() -> None:
    world = World(TWO)
    for page in (16, 17, c.NONE):
        refused(c.E_ARGUMENT, world.core.page, page)


def test_releasing_or_evicting_what_is_held_is_refused() -> None:
    world = World(TWO)
    region = world.reserve(2 * PAGE_BYTES)
    pin = world.start([pages_of(region, 1, 1, c.OVERWRITE)])
    for _ in range(2):
        refused(c.E_STATE, world.core.release, region.handle)
        refused(c.E_STATE, world.core.evict, region.handle, 0, region.size_bytes)
        drain(world)
        world.verify()
    world.unpin(pin)
    assert world.release(region)
    close(world)


def test_releasing_what_a_pending_pin_waits_for_is_refused() -> None:
    world = World(TWO)
    region = written(world, 2)
    other = written(world, 4)
    pin = world.start([whole(region)])
    assert not pin.granted
    refused(c.E_STATE, world.core.release, region.handle)
    world.unpin(pin)
    assert world.release(region)
    world.verify()
    pin = world.start([whole(other)])
    drain(world)
    assert pin.granted
    close(world)


def test_double_unpin_and_double_start_are_refused() -> None:
    world = World(TWO)
    region = world.reserve(PAGE_BYTES)
    pin = world.core.pin([(region.handle, 0, PAGE_BYTES, c.OVERWRITE)])
    refused(c.E_STATE, pin.restart)
    pin.release()
    refused(c.E_STATE, pin.release)
    world.core.check()
    pending = world.core.pin([(region.handle, 0, PAGE_BYTES, c.READ)])
    refused(c.E_STATE, pending.restart)
    pending.release()
    refused(c.E_STATE, pending.release)
    assert world.core.check() == 0
    assert world.core.held_frames == 0


def test_everything_pinned_is_told_with_counts() -> None:
    world = World(TWO)
    region = world.reserve(4 * PAGE_BYTES)
    other = world.reserve(2 * PAGE_BYTES)
    pin = world.start([whole(region, c.OVERWRITE)])
    assert pin.granted
    error = refused(c.E_FRAMES, world.core.pin, [(other.handle, 0, 2 * PAGE_BYTES, c.READ)])
    assert (error.frames_needed, error.frames_unheld) == (2, 0)
    world.verify()
    world.unpin(pin)
    assert world.start([whole(other)]) is not None
    close(world)


def test_pin_larger_than_the_device_is_refused_with_counts() -> None:
    world = World(TWO)
    region = world.reserve(5 * PAGE_BYTES)
    request = [(region.handle, 0, 5 * PAGE_BYTES, c.READ)]
    error = refused(c.E_FRAMES, world.core.pin, request)
    assert (error.frames_needed, error.frames_unheld) == (5, 4)
    close(world)


def test_accesses_of_one_pin_that_do_not_fit_together_hold_nothing() -> None:
    world = World(TWO)
    regions = [world.reserve(3 * PAGE_BYTES) for _ in range(2)]
    request = [(region.handle, 0, 3 * PAGE_BYTES, c.READ) for region in regions]
    error = refused(c.E_FRAMES, world.core.pin, request)
    assert (error.frames_needed, error.frames_unheld) == (6, 4)
    assert world.core.held_frames == 0
    world.verify()
    close(world)


@pytest.mark.parametrize(
    "shape",
    [Shape(4, 0, 4, 2, 24), Shape(4, 4, 0, 2, 24), Shape(4, 2, 4, 2, 24), Shape(4, 1, 1, 2, 24)],
    ids=["flash", "host", "three", "smallest"],
)
def test_full_tiers_lose_nothing_and_recover_after_a_release(shape: Shape) -> None:
    world = World(shape)
    regions = []
    for _ in range(shape.page_count):
        region = world.reserve(PAGE_BYTES)
        pin = world.start([whole(region, c.OVERWRITE)])
        if pin is not None:
            drain(world)
        if pin is None or not pin.granted:
            assert world.full_is_justified()
            break
        world.unpin(pin)
        regions.append(region)
    else:
        raise AssertionError("more pages were written than there are frames")
    # At the least, every frame of the lowest tier and the device is of use.
    low = shape.frames[shape.tiers[-1]]
    assert len(regions) >= max(low, shape.device)
    drain(world)
    for victim in regions[:2]:
        assert world.release(victim)
    drain(world)
    pin = world.start([whole(region, c.OVERWRITE)])
    assert pin is not None
    drain(world)
    assert pin.granted
    close(world)


def test_evict_into_a_full_tier_is_told_and_loses_nothing() -> None:
    world = World(Shape(4, 0, 2, 2, 16))
    region = world.reserve(4 * PAGE_BYTES)
    pin = world.start([whole(region, c.OVERWRITE)])
    world.unpin(pin)
    codes = set()
    for _ in range(8):
        try:
            world.core.evict(region.handle, 0, region.size_bytes)
        except c.CoreError as error:
            codes.add(error.code)
        drain(world)
    assert codes == {c.E_FULL}
    close(world)


def test_access_beyond_the_last_byte_but_inside_the_last_page_is_no_surprise() -> None:
    """Whether refused or allowed, nothing breaks: a region has at least the bytes asked for."""
    world = World(TWO)
    region = world.reserve(PAGE_BYTES + 1)
    codes = []
    try:
        world.core.pin([(region.handle, PAGE_BYTES, PAGE_BYTES, c.READ)]).release()
    except c.CoreError as error:
        codes.append(error.code)
    assert codes in ([], [c.E_ARGUMENT])
    assert world.core.check() == 0


@pytest.mark.parametrize(
    "mistake",
    [
        "core.complete(transfer); core.complete(transfer)",
        "core.complete(transfer._replace(target_frame=transfer.target_frame ^ 1))",
        "core.complete(transfer._replace(first_page=9))",
        "core.complete(transfer._replace(link=c.MOVE))",
        "core.complete(transfer._replace(page_count=2))",
    ],
)
def test_completion_of_what_is_not_in_flight_never_passes(mistake: str) -> None:
    """A mistake of the program: refused or aborted, but not taken."""
    program = f"""
        core = c.Core(page_bytes=4096, page_count=16, device_frames=4, flash_frames=16)
        region = core.reserve(4096)
        pin = core.pin([(region, 0, 4096, c.READ)])
        transfer = core.next_transfer()
        {mistake}
        """
    run = run_apart(program)
    assert run.returncode != 0, "the core took it"
    assert run.returncode == -signal.SIGABRT or "CoreError" in run.stderr, run.stderr


def test_unaligned_ends_of_a_range_count_whole_pages() -> None:
    world = World(TWO)
    region = world.reserve(3 * PAGE_BYTES)
    pin = world.start([Access(region, PAGE_BYTES - 1, 2, c.READ)])
    drain(world)
    assert pin.granted
    assert pin.core_pin.accesses[0].page_count == 2
    assert pin.core_pin.accesses[0].device_bytes % PAGE_BYTES == PAGE_BYTES - 1
    close(world)
