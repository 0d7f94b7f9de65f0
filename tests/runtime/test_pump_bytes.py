# SPDX-License-Identifier: Apache-2.0
"""Every byte, through the whole pump: regions against plain NumPy arrays, in each set-up of tiers."""

from __future__ import annotations

import gc
import random
import threading

import numpy
import pytest

from pagert._core.device import CpuDevice
from pagert._core.pump import OVERWRITE, READ, UPDATE, Pump
from pagert.engines.flash import open_flash
from pagert.errors import OutOfFrames

PAGE_BYTES = 4096

SETUPS = {
    "device+flash": {"host_frames": 0, "flash_frames": 400},
    "device+host": {"host_frames": 400, "flash_frames": 0},
    "device+host+flash": {"host_frames": 9, "flash_frames": 400},
    "one host frame": {"host_frames": 1, "flash_frames": 400},
}


@pytest.fixture(params=SETUPS)
def make_pump(request, tmp_path):
    pumps = []

    def make(device_frames: int, **settings) -> Pump:
        setup = SETUPS[request.param]
        flash = None
        if setup["flash_frames"]:
            flash = open_flash(
                tmp_path, capacity_bytes=setup["flash_frames"] * PAGE_BYTES, block_bytes=PAGE_BYTES
            )
        pump = Pump(
            CpuDevice(
                device_bytes=device_frames * PAGE_BYTES,
                host_bytes=setup["host_frames"] * PAGE_BYTES,
            ),
            page_bytes=PAGE_BYTES,
            page_count=4096,
            flash=flash,
            deadline_seconds=60.0,
            **settings,
        )
        pumps.append(pump)
        return pump

    yield make
    for pump in pumps:
        pump.close()


class Storage:
    """A region and the bytes it must hold."""

    def __init__(self, pump: Pump, size_bytes: int) -> None:
        self.region = pump.reserve(size_bytes)
        self.expected = numpy.zeros(size_bytes, dtype=numpy.uint8)


def random_range(chance: random.Random, size_bytes: int) -> tuple[int, int]:
    if chance.random() < 0.4:
        return 0, size_bytes
    start = chance.randrange(size_bytes)
    return start, chance.randint(1, size_bytes - start)


def use(pump: Pump, arena: numpy.ndarray, chance: random.Random, storages: list[Storage]) -> None:
    """One operator: reads are compared, writes are done on both sides."""
    wanted = []
    for storage in chance.sample(storages, min(len(storages), chance.randint(1, 3))):
        start, size = random_range(chance, len(storage.expected))
        wanted.append((storage, start, size, chance.choice([READ, UPDATE, OVERWRITE])))
    with pump.pin([(s.region, start, size, mode) for s, start, size, mode in wanted]) as pin:
        for (storage, start, size, mode), at in zip(wanted, pin.device_bytes, strict=True):
            seen = arena[at : at + size]
            expected = storage.expected[start : start + size]
            if mode != OVERWRITE:
                assert numpy.array_equal(seen, expected)
            if mode != READ:
                written = numpy.frombuffer(chance.randbytes(size), dtype=numpy.uint8)
                seen[:] = written
                expected[:] = written


@pytest.mark.parametrize("transfer_pages_max", [1, 16])
@pytest.mark.parametrize("device_frames", [40, 120])
def test_every_byte_survives_random_use(make_pump, device_frames, transfer_pages_max):
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    pump = make_pump(device_frames, transfer_pages_max=transfer_pages_max)
    arena = numpy.frombuffer(pump.arena, dtype=numpy.uint8)
    storages: list[Storage] = []
    for _ in range(600):
        action = chance.random()
        pages = sum(-(-len(s.expected) // PAGE_BYTES) for s in storages)
        if action < 0.08 and pages < 240:
            storages.append(Storage(pump, chance.randint(1, 13 * PAGE_BYTES)))
        elif action < 0.12 and storages:
            storages.remove(chance.choice(storages))
        elif action < 0.18 and storages:
            storage = chance.choice(storages)
            pump.evict(storage.region, *random_range(chance, len(storage.expected)))
        elif action < 0.26 and storages:
            storage = chance.choice(storages)
            pump.prefetch(storage.region, *random_range(chance, len(storage.expected)))
        elif action < 0.27:
            pump.flush()
        elif storages:
            use(pump, arena, chance, storages)
        assert pump.check() == 0
    for capacity, used, peak in pump.state()["usage"]:
        assert used <= peak <= capacity


def test_threads_meet_only_in_the_core(make_pump):
    """Each thread has storages of its own; together they do not fit, one operator of each does."""
    threads_count, frames_each = 4, 36
    pump = make_pump(threads_count * frames_each)
    arena = numpy.frombuffer(pump.arena, dtype=numpy.uint8)
    seed = random.randrange(2**32)
    print("seed", seed)
    failures = []

    def work(number: int) -> None:
        chance = random.Random(seed + number)
        storages = [Storage(pump, chance.randint(1, 11 * PAGE_BYTES)) for _ in range(8)]
        try:
            for _ in range(150):
                use(pump, arena, chance, storages)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(threads_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gc.collect()
    assert pump.check() == 0
    assert pump.state()["reserved_pages"] == 0
    assert [used for _, used, _ in pump.state()["usage"]] == [0, 0, 0]


def test_a_thread_waits_for_frames_that_another_holds(make_pump):
    pump = make_pump(8)
    first, second = pump.reserve(6 * PAGE_BYTES), pump.reserve(6 * PAGE_BYTES)
    held = pump.pin([(first, 0, first.size_bytes, UPDATE)])
    entered = threading.Event()
    got = []

    def work() -> None:
        entered.set()
        with pump.pin([(second, 0, second.size_bytes, UPDATE)]) as pin:
            got.append(pin.device_bytes)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    held.release()
    thread.join()
    assert len(got) == 1


def test_one_thread_does_not_wait_for_itself(make_pump):
    pump = make_pump(8)
    first, second = pump.reserve(6 * PAGE_BYTES), pump.reserve(6 * PAGE_BYTES)
    with pump.pin([(first, 0, first.size_bytes, UPDATE)]):
        with pytest.raises(
            OutOfFrames, match=r"needs 6 frames \(24 KiB\); 2 of 8 are unpinned"
        ) as caught:
            pump.pin([(second, 0, second.size_bytes, READ)])
    assert caught.value.needed_bytes == 6 * PAGE_BYTES
    assert caught.value.unpinned_bytes == 2 * PAGE_BYTES
    with pump.pin([(second, 0, second.size_bytes, READ)]):
        pass


def test_a_pin_that_is_collected_lets_go(make_pump):
    pump = make_pump(8)
    region = pump.reserve(8 * PAGE_BYTES)
    pin = pump.pin([(region, 0, region.size_bytes, UPDATE)])
    assert pump.state()["held_frames"] == 8
    del pin, region
    gc.collect()
    assert pump.state()["held_frames"] == 0
    assert pump.state()["reserved_pages"] == 0
