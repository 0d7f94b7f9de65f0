# SPDX-License-Identifier: Apache-2.0
"""What the core costs in memory; 100 TiB of address space cost nothing until they are used."""

from __future__ import annotations

import textwrap

from core_apart import run_apart

from pagert._core import core as c

BASE = {
    "page_bytes": 65536,
    "page_count": 1 << 20,
    "device_frames": 1 << 10,
    "host_frames": 1 << 10,
    "flash_frames": 1 << 10,
    "transfer_pages_max": 16,
}


def memory(**changes: int | str) -> int:
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


def test_lookahead_costs_9_bytes_more_a_page_40_a_device_frame_and_29_a_host_frame() -> None:
    def costs(**changes: int) -> int:
        return memory(policy="lookahead", **changes) - memory(**changes)

    pages, frames = BASE["page_count"], BASE["device_frames"]
    assert costs(page_count=9 * pages) - costs() <= 9 * 8 * pages + 64
    assert costs(device_frames=9 * frames) - costs() <= 40 * 8 * frames + 64
    assert costs(host_frames=9 * BASE["host_frames"]) - costs() <= 29 * 8 * BASE["host_frames"] + 64
    assert costs(flash_frames=9 * BASE["flash_frames"]) == costs()
    assert costs(page_count=1, device_frames=1, host_frames=1) < 24 * 2**20


def test_the_constant_part_is_small() -> None:
    smallest = {"page_count": 1, "device_frames": 1, "host_frames": 0, "flash_frames": 1}
    assert memory(**smallest) < 65536


# Run apart, so that what the tests' own process holds does not count.
HUGE = """
    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def use(region, offset_bytes, size_bytes, mode):
        pin = core.pin([(region, offset_bytes, size_bytes, mode)])
        while (transfer := core.next_transfer()) is not None:
            core.complete(transfer)
        assert pin.poll()
        pin.release()

    page_bytes = 65536
    page_count = 100 * 2**40 // page_bytes
    before = resident_bytes()
    core = c.Core(page_bytes=page_bytes, page_count=page_count, device_frames=8192,
                  host_frames=65536, flash_frames=1 << 24, transfer_pages_max=16)
    assert core.memory_bytes >= page_count
"""


def grown_bytes(program: str) -> int:
    """Run `program` on a pager of 100 TiB, 1.68 thousand million pages; how much memory it took."""
    text = textwrap.dedent(HUGE) + textwrap.dedent(program) + "print(resident_bytes() - before)\n"
    run = run_apart(text)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def test_a_hundred_tebibytes_cost_nothing_until_they_are_used() -> None:
    program = """
        regions = [core.reserve(3 * page_bytes) for _ in range(100)]
        for region in regions:
            use(region, 17, 2 * page_bytes, c.UPDATE)
        for region in regions[:50]:
            assert core.evict(region, 0, 3 * page_bytes) == 3
        while (transfer := core.next_transfer()) is not None:
            core.complete(transfer)
        assert core.page(regions[0].first_page).state == c.ABSENT
        for region in regions:
            core.release(region)
        for tier in range(3):
            assert core.usage(tier).used_frames == 0
        """
    assert grown_bytes(program) < 4 * 2**20


def test_a_region_costs_the_entries_of_its_own_pages_and_no_others() -> None:
    """The entries of 2**20 pages; a region that takes the place of a released one costs nothing."""
    program = """
        region = core.reserve(64 * 2**30)
        use(region, 50 * 2**30 + 17, 5 * page_bytes, c.UPDATE)
        core.release(region)
        again = core.reserve(32 * 2**30)
        use(again, 31 * 2**30, page_bytes, c.READ)
        """
    assert grown_bytes(program) < 64 * 2**20 + 4 * 2**20
