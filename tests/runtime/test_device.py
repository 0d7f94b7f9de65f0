# SPDX-License-Identifier: Apache-2.0
"""The device comes to the pump as one object, and serves one pump."""

from __future__ import annotations

import pytest

from pagert import Pager
from pagert._core.device import CpuDevice
from pagert._core.pump import OVERWRITE, Pump
from pagert.errors import ConfigurationError

PAGE_BYTES = 4096


def make_device(pages: int = 4) -> CpuDevice:
    return CpuDevice(device_bytes=pages * PAGE_BYTES, host_bytes=8 * PAGE_BYTES)


def make_pump(device: CpuDevice, page_bytes: int = PAGE_BYTES, policy: str = "lru") -> Pump:
    return Pump(device, page_bytes=page_bytes, page_count=64, policy=policy)


def test_the_pump_has_the_devices_arena_and_counts_its_frames() -> None:
    device = make_device()
    pump = make_pump(device)
    assert pump.device is device
    assert pump.arena is device.arena
    assert [capacity for capacity, _, _ in pump.state()["usage"]] == [4, 8, 0]
    pump.close()


def test_a_fence_of_the_cpu_has_passed() -> None:
    device = make_device()
    assert device.fence().passed()
    device.close()


def test_a_second_pump_is_refused_and_leaves_the_device_to_the_first() -> None:
    device = make_device()
    pump = make_pump(device)
    with pytest.raises(ValueError, match="belongs to a pump already"):
        make_pump(device)
    region = pump.reserve(PAGE_BYTES)
    with pump.pin([(region, 0, PAGE_BYTES, OVERWRITE)]):
        pass
    pump.evict(region, 0, PAGE_BYTES)
    assert pump.locate(region, 0, PAGE_BYTES) == (0, 0, 1, 0)
    pump.close()


def test_a_pump_that_was_refused_before_it_took_the_device_leaves_it_usable() -> None:
    device = make_device()
    with pytest.raises(ConfigurationError, match="policy is 'fifo'; allowed: 'lru', 'lookahead'"):
        make_pump(device, policy="fifo")
    with pytest.raises(ConfigurationError, match="no whole number of pages of 3000 bytes"):
        make_pump(device, page_bytes=3000)
    make_pump(device).close()


def test_closing_the_pump_closes_the_device_and_keeps_its_addresses() -> None:
    device = make_device()
    pump = make_pump(device)
    address = device.arena.address
    pump.close()
    device.close()
    assert device.host_arena is None
    assert device.arena.address == address
    with pytest.raises(ValueError, match="the copy engine is closed"):
        make_pump(device)


def test_the_storage_of_a_pager_has_the_arenas_address_and_size() -> None:
    with Pager(device_bytes=4 * PAGE_BYTES, host_bytes="1MiB", page_bytes=PAGE_BYTES) as pager:
        assert pager.storage.data_ptr() == pager.pump.arena.address
        assert pager.storage.nbytes() == pager.pump.arena.size_bytes == 4 * PAGE_BYTES
