# SPDX-License-Identifier: Apache-2.0
import dataclasses
import pathlib
import re

import pytest

from pagert.stats import Stats, TierStats

LINKS = (
    "FILL",
    "MOVE",
    "HOST_TO_DEVICE",
    "FLASH_TO_DEVICE",
    "FLASH_TO_HOST",
    "DEVICE_TO_HOST",
    "DEVICE_TO_FLASH",
    "HOST_TO_FLASH",
)
HEADER = pathlib.Path(__file__).parents[2] / "include" / "pagert" / "core.h"


def state(*, usage=((8, 5, 7), (16, 9, 11), (32, 17, 19))):
    """A pump's state in which every number is another one: link k has moved 10 ** k pages."""
    return {
        "counters": {
            "hits": 101,
            "faults": 102,
            "evictions": 103,
            "prefetches": 104,
            "transferred": [10**link for link in range(len(LINKS))],
            "transfers": [2] * len(LINKS),
            "failed_transfers": 105,
        },
        "usage": list(usage),
        "held_frames": 3,
        "in_flight": 6,
        "reserved_pages": 77,
        "stall_ns": 1_500_000_000,
    }


def test_links_are_in_the_order_of_the_header():
    declared = re.search(r"enum \{\s*PAGERT_FILL,(.*?)PAGERT_LINK_COUNT", HEADER.read_text(), re.S)
    names = ["FILL", *re.findall(r"PAGERT_(\w+)", declared[1])]
    assert tuple(names) == LINKS


def test_every_field_counts_what_its_name_says():
    page = 4096
    stats = Stats.from_state(state(), page_bytes=page, flash_backend="threads", flash_direct=False)
    assert stats == Stats(
        device=TierStats(capacity_bytes=8 * page, used_bytes=5 * page, peak_bytes=7 * page),
        host=TierStats(capacity_bytes=16 * page, used_bytes=9 * page, peak_bytes=11 * page),
        flash=TierStats(capacity_bytes=32 * page, used_bytes=17 * page, peak_bytes=19 * page),
        hits=101,
        faults=102,
        evictions=103,
        prefetches=104,
        filled_bytes=1 * page,
        moved_bytes=10 * page,
        host_to_device_bytes=100 * page,
        flash_read_bytes=11_000 * page,
        device_to_host_bytes=100_000 * page,
        flash_written_bytes=11_000_000 * page,
        failed_transfers=105,
        stall_seconds=1.5,
        held_bytes=3 * page,
        in_flight_transfers=6,
        reserved_bytes=77 * page,
        flash_backend="threads",
        flash_direct=False,
    )


def test_tiers_that_are_not_configured_are_none():
    stats = Stats.from_state(state(usage=((8, 0, 0), (0, 0, 0), (0, 0, 0))), page_bytes=4096)
    assert stats.host is None and stats.flash is None
    assert stats.flash_backend is None and stats.flash_direct is None


def test_a_state_without_a_device_tier_is_refused():
    with pytest.raises(ValueError, match="device tier"):
        Stats.from_state(state(usage=((0, 0, 0),) * 3), page_bytes=4096)


def test_statistics_cannot_be_changed():
    stats = Stats.from_state(state(), page_bytes=4096)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.hits = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.device.used_bytes = 0
