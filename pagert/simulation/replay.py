# SPDX-License-Identifier: Apache-2.0
"""The core on a trace: every transfer is over as soon as it is handed out, and no byte is moved."""

from __future__ import annotations

import numpy as np

from pagert._core import core
from pagert._core import replay as driver
from pagert.errors import ConfigurationError
from pagert.simulation.counts import Counts
from pagert.trace import Trace

__all__ = ["has_policy", "replay"]

_PAGE_BYTES = 4096  # the core's smallest: a trace counts pages, and no bytes lie behind them
_JOINED_PAGES = 64  # in one transfer: fewer calls for the same pages
_BACKLOG_PAGES = 64  # that may wait for their fetch when the policy looks ahead


def has_policy(policy: str) -> bool:
    """Whether the core has this policy."""
    return policy in core.policy_names()


def replay(
    trace: Trace, capacity_pages: int, host_pages: int, policy: str, prefetch: bool
) -> list[Counts]:
    """Drive a core through the trace; what it counted in each step.

    Raises
    ------
    ConfigurationError
        The core does not have this policy.
    """
    if not has_policy(policy):
        raise ConfigurationError(
            f"policy {policy!r} is not in this version's core; there are "
            f"{', '.join(repr(name) for name in core.policy_names() if has_policy(name))}, "
            "and 'min', which needs no core"
        )
    driven = core.Core(
        page_bytes=_PAGE_BYTES,
        # Regions are never given the pages of earlier ones, so there is room for all of them.
        page_count=max(1, sum(trace.region_pages)),
        device_frames=capacity_pages,
        host_frames=host_pages,
        flash_frames=max(1, trace.peak_pages),
        transfer_pages_max=_JOINED_PAGES,
        policy=policy,
    )
    handles = np.zeros((max(1, trace.region_count), 2), dtype=np.uint32)
    _store(driven, trace, handles, capacity_pages)
    rows = trace.rows
    snapshots = np.zeros((trace.step_count + 1, driver.COLUMNS), dtype=np.uint64)
    driver.replay(
        driven,
        _PAGE_BYTES,
        np.ascontiguousarray(rows["kind"]),
        np.ascontiguousarray(rows["mode"]),
        np.ascontiguousarray(rows["region"]),
        np.ascontiguousarray(rows["first"]),
        np.ascontiguousarray(rows["count"]),
        handles,
        snapshots,
        _BACKLOG_PAGES if prefetch else 0,
    )
    snapshots[1:] -= snapshots[:-1].copy()
    steps = [_counts(*row) for row in snapshots.tolist()]
    return steps if steps[-1] != Counts() or len(steps) == 1 else steps[:-1]


def _store(driven: core.Core, trace: Trace, handles: np.ndarray, capacity_pages: int) -> None:
    """Bring the regions that held bytes before the trace began to where they were: below."""
    rows = trace.rows
    stored = rows[(rows["kind"] == driver.RESERVE) & (rows["mode"] == 1)]
    for number, page_count in zip(stored["region"].tolist(), stored["count"].tolist()):
        region = driven.reserve(page_count * _PAGE_BYTES)
        handles[number] = region
        for first in range(0, page_count, capacity_pages):
            count = min(capacity_pages, page_count - first)
            extent = first * _PAGE_BYTES, count * _PAGE_BYTES
            pin = driven.pin([(region, *extent, core.OVERWRITE)])
            while not pin.ready:
                _carry_out(driven)
                pin.poll()
            pin.release()
            driven.evict(region, *extent)
            _carry_out(driven)
    driven.reset_counters()


def _carry_out(driven: core.Core) -> None:
    while (transfer := driven.next_transfer()) is not None:
        driven.complete(transfer)


def _counts(hits: int, faults: int, evictions: int, prefetches: int, *moved: int) -> Counts:
    return Counts(
        hits=hits,
        faults=faults,
        prefetched_pages=prefetches,
        fetched_pages=moved[core.HOST_TO_DEVICE] + moved[core.FLASH_TO_DEVICE],
        written_pages=moved[core.DEVICE_TO_HOST] + moved[core.DEVICE_TO_FLASH],
        flash_read_pages=moved[core.FLASH_TO_HOST] + moved[core.FLASH_TO_DEVICE],
        flash_written_pages=moved[core.HOST_TO_FLASH] + moved[core.DEVICE_TO_FLASH],
    )
