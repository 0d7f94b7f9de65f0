# SPDX-License-Identifier: Apache-2.0
"""What a pager has done and holds: values at one moment, in bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Stats", "TierStats"]

# Links in the order of the core's list, see include/pagert/core.h.
_FILL = 0
_MOVE = 1
_HOST_TO_DEVICE = 2
_FLASH_TO_DEVICE = 3
_FLASH_TO_HOST = 4
_DEVICE_TO_HOST = 5
_DEVICE_TO_FLASH = 6
_HOST_TO_FLASH = 7


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """The use of one tier.

    Attributes
    ----------
    capacity_bytes : int
        The budget, in whole pages. `used_bytes` and `peak_bytes` never exceed it.
    used_bytes : int
        Frames that hold a page or are promised to one, in bytes.
    peak_bytes : int
        The most that `used_bytes` has been since the pager was made or its statistics were reset.
    """

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A pager's statistics. Counters run since the pager was made or `reset_stats()` was called.

    Attributes
    ----------
    device, host, flash : TierStats or None
        The use of each tier; None where the tier is not configured.
    hits, faults : int
        Pages that operators found resident, and pages that had to be fetched or made for them.
    evictions : int
        Pages that gave up their device frame to another page.
    prefetches : int
        Pages fetched before an operator asked for them.
    flash_read_bytes, flash_written_bytes : int
        Bytes read from and written to the flash tier's file.
    host_to_device_bytes, device_to_host_bytes : int
        Bytes copied between the two tiers.
    moved_bytes : int
        Bytes moved inside the device tier, to make room for a contiguous window.
    filled_bytes : int
        Bytes of pages that were made of zeros, at their first use.
    failed_transfers : int
        Transfers that an engine reported as failed. Nothing is lost by one.
    stall_seconds : float
        Time that operators waited for bytes.
    held_bytes : int
        Device frames that operators and open `resident()` contexts hold at this moment, in bytes.
    in_flight_transfers : int
        Transfers under way at this moment.
    reserved_bytes : int
        Virtual address space of all living tensors at this moment, in whole pages.
    activation_bytes : int
        Bytes that `Pager.activations` holds in pages for backward passes at this moment.
    activation_stored_bytes : int
        Bytes that it copied into pages.
    flash_backend : str or None
        How flash requests reach the kernel: 'io_uring' or 'threads'; None without a flash tier.
    flash_direct : bool or None
        Whether flash I/O goes around the OS page cache; None without a flash tier.
    """

    device: TierStats
    host: TierStats | None
    flash: TierStats | None
    hits: int
    faults: int
    evictions: int
    prefetches: int
    flash_read_bytes: int
    flash_written_bytes: int
    host_to_device_bytes: int
    device_to_host_bytes: int
    moved_bytes: int
    filled_bytes: int
    failed_transfers: int
    stall_seconds: float
    held_bytes: int
    in_flight_transfers: int
    reserved_bytes: int
    activation_bytes: int = 0
    activation_stored_bytes: int = 0
    flash_backend: str | None = None
    flash_direct: bool | None = None

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        *,
        page_bytes: int,
        flash_backend: str | None = None,
        flash_direct: bool | None = None,
    ) -> Stats:
        """Build the statistics from the pump's state, which counts in pages and nanoseconds.

        Parameters
        ----------
        state : mapping
            What `Pump.state()` returns.
        page_bytes : int
            Size of a page.
        flash_backend, flash_direct
            Facts of the flash engine, see the attributes.
        """
        counters = state["counters"]
        pages = counters["transferred"]
        device, host, flash = (_tier_stats(usage, page_bytes) for usage in state["usage"])
        if device is None:
            raise ValueError("the pump's state has no device tier, which every pager has")
        return cls(
            device=device,
            host=host,
            flash=flash,
            hits=counters["hits"],
            faults=counters["faults"],
            evictions=counters["evictions"],
            prefetches=counters["prefetches"],
            flash_read_bytes=(pages[_FLASH_TO_DEVICE] + pages[_FLASH_TO_HOST]) * page_bytes,
            flash_written_bytes=(pages[_DEVICE_TO_FLASH] + pages[_HOST_TO_FLASH]) * page_bytes,
            host_to_device_bytes=pages[_HOST_TO_DEVICE] * page_bytes,
            device_to_host_bytes=pages[_DEVICE_TO_HOST] * page_bytes,
            moved_bytes=pages[_MOVE] * page_bytes,
            filled_bytes=pages[_FILL] * page_bytes,
            failed_transfers=counters["failed_transfers"],
            stall_seconds=state["stall_ns"] / 1e9,
            held_bytes=state["held_frames"] * page_bytes,
            in_flight_transfers=state["in_flight"],
            reserved_bytes=state["reserved_pages"] * page_bytes,
            flash_backend=flash_backend,
            flash_direct=flash_direct,
        )


def _tier_stats(usage: Sequence[int], page_bytes: int) -> TierStats | None:
    capacity_frames, used_frames, peak_frames = usage
    if capacity_frames == 0:
        return None
    return TierStats(
        capacity_bytes=capacity_frames * page_bytes,
        used_bytes=used_frames * page_bytes,
        peak_bytes=peak_frames * page_bytes,
    )
