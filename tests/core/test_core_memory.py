# SPDX-License-Identifier: Apache-2.0
"""What the core costs in memory, and that an address space of 100 TiB costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from pagert._core import pager as c

BASE = {
    "page_bytes": 65536,
    "page_count": 1 << 20,
    "device_frames": 1 << 10,
    "host_frames": 1 << 10,
    "flash_frames": 1 << 10,
    "transfer_pages_max": 16,
}


def memory(**changes: int) -> int:
    return c.memory_bytes(**(BASE | changes))


def test_a_page_costs_at_most_64_bytes() -> None:
    for page_count in (1 << 20, 1 << 24, 1 << 30):
        more = memory(page_count=2 * page_count) - memory(page_count=page_count)
        assert 0 < more <= 64 * page_count


def test_a_frame_costs_at_most_12_bytes() -> None:
    for tier in ("device_frames", "host_frames", "flash_frames"):
        for frame_count in (1 << 10, 1 << 20, 1 << 28):
            more = memory(**{tier: 2 * frame_count}) - memory(**{tier: frame_count})
            assert 0 <= more <= 12 * frame_count + 64


def test_the_constant_part_is_small() -> None:
    smallest = {"page_count": 1, "device_frames": 1, "host_frames": 0, "flash_frames": 1}
    assert memory(**smallest) < 65536


def test_a_hundred_tebibytes_cost_nothing_until_they_are_used() -> None:
    """1.68 thousand million pages: 100 GiB of metadata that are never touched."""
    program = """
        from pagert._core import pager as c

        def resident_bytes():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        page_bytes = 65536
        page_count = 100 * 2**40 // page_bytes
        before = resident_bytes()
        core = c.Core(page_bytes=page_bytes, page_count=page_count, device_frames=8192,
                      host_frames=65536, flash_frames=1 << 24, transfer_pages_max=16)
        assert core.memory_bytes >= page_count
        small = core.reserve(3 * page_bytes)
        huge = core.reserve(60 * 2**40)
        far = huge.first_page + 50 * 2**40 // page_bytes

        def use(region, offset_bytes, size_bytes, mode):
            pin = core.pin([(region, offset_bytes, size_bytes, mode)])
            while (transfer := core.next_transfer()) is not None:
                core.complete(transfer)
            assert pin.poll()
            pin.release()

        use(small, 0, 3 * page_bytes, c.UPDATE)
        use(huge, 50 * 2**40 + 17, 5 * page_bytes, c.UPDATE)
        assert core.page(far).state == c.RESIDENT
        assert core.evict(huge, 50 * 2**40, page_bytes) == 1
        while (transfer := core.next_transfer()) is not None:
            core.complete(transfer)
        assert core.page(far).state == c.ABSENT
        core.release(huge)
        core.release(small)
        again = core.reserve(99 * 2**40)
        use(again, 98 * 2**40, page_bytes, c.READ)
        for tier in range(3):
            assert core.usage(tier).used_frames == (tier == c.DEVICE)
        print(resident_bytes() - before)
        """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 8 * 2**20
