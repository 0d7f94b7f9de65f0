# SPDX-License-Identifier: Apache-2.0
"""The core on a trace: every transfer is over as soon as it is handed out, and no byte is moved."""

from __future__ import annotations

from pagert._core import pager as core
from pagert.errors import ConfigurationError
from pagert.simulation.counts import Counts
from pagert.trace import Operator, Release, Reserve, Step, Trace

__all__ = ["has_policy", "replay"]

_MODES = {"r": core.READ, "w": core.UPDATE, "o": core.OVERWRITE}
_JOINED_PAGES = 64  # in one transfer: fewer calls for the same pages


def replay(trace: Trace, capacity_pages: int, host_pages: int, policy: str) -> list[Counts]:
    """Drive a core through the trace; what it counted in each step.

    Raises
    ------
    ConfigurationError
        The core does not have this policy.
    """
    # Regions are never given the pages of earlier ones, so the address space has room for all of them.
    page_count = max(1, sum(trace.region_pages))
    if not has_policy(policy):
        raise ConfigurationError(
            f"policy {policy!r} is not in this version's core; there are 'lru', and 'min', which needs "
            "no core"
        )
    pager = core.Core(
        # The core's smallest page: sizes are in pages here, and no bytes lie behind them.
        page_bytes=4096,
        page_count=page_count,
        device_frames=capacity_pages,
        host_frames=host_pages,
        flash_frames=max(1, trace.peak_pages),
        transfer_pages_max=_JOINED_PAGES,
        policy=policy,
    )
    regions: dict[int, core.Region] = {}
    _store(pager, trace, regions, capacity_pages)
    counts: list[Counts] = []
    before, reached = Counts(), False
    for event in trace:
        if type(event) is Operator:
            _pin(pager, [
                (regions[region], first << 12, count << 12, _MODES[mode])
                for region, first, count, mode in event.accesses
            ])  # fmt: skip
            reached = True
        elif type(event) is Reserve:
            if event.region not in regions:
                regions[event.region] = pager.reserve(event.page_count << 12)
        elif type(event) is Release:
            pager.release(regions.pop(event.region))
        elif type(event) is Step:
            now = _counts(pager)
            counts.append(now - before)
            before, reached = now, False
    if reached or not counts:
        counts.append(_counts(pager) - before)
    return counts


def has_policy(policy: str) -> bool:
    """Whether the core has this policy."""
    try:
        return core.memory_bytes(page_bytes=4096, page_count=1, device_frames=1, flash_frames=1, policy=policy) > 0
    except ValueError:
        return False


def _store(
    pager: core.Core, trace: Trace, regions: dict[int, core.Region], capacity_pages: int
) -> None:
    """Bring the regions that held bytes before the trace began to where they were: below."""
    for event in trace:
        if type(event) is not Reserve or not event.stored:
            continue
        region = regions[event.region] = pager.reserve(event.page_count << 12)
        for first in range(0, event.page_count, capacity_pages):
            extent = first << 12, min(capacity_pages, event.page_count - first) << 12
            _pin(pager, [(region, *extent, core.OVERWRITE)])
            pager.evict(region, *extent)
            _carry_out(pager)
    pager.reset_counters()


def _pin(pager: core.Core, accesses: list[tuple[core.Region, int, int, int]]) -> None:
    if not accesses:
        return
    pin = pager.pin(accesses)
    while not pin.ready:
        _carry_out(pager)
        pin.poll()
    pin.release()


def _carry_out(pager: core.Core) -> None:
    while (transfer := pager.next_transfer()) is not None:
        pager.complete(transfer)


def _counts(pager: core.Core) -> Counts:
    counters = pager.counters()
    moved = counters.transferred
    return Counts(
        hits=counters.hits,
        faults=counters.faults,
        fetched_pages=moved[core.HOST_TO_DEVICE] + moved[core.FLASH_TO_DEVICE],
        written_pages=moved[core.DEVICE_TO_HOST] + moved[core.DEVICE_TO_FLASH],
        flash_read_pages=moved[core.FLASH_TO_HOST] + moved[core.FLASH_TO_DEVICE],
        flash_written_pages=moved[core.HOST_TO_FLASH] + moved[core.DEVICE_TO_FLASH],
    )
