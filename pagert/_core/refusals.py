# SPDX-License-Identifier: Apache-2.0
"""The errors and warnings of the pump and of operations, with their texts: the value, the limit and the remedy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from errno import EBADMSG, EINVAL, ENOMEM

import torch

from pagert._core.arena import format_size
from pagert._core.core import E_PAGES, E_STALE, E_STATE
from pagert.errors import (
    ConfigurationError,
    ForeignTensor,
    OutOfFrames,
    PagertError,
    TierFull,
    TransferError,
    UnsupportedOperator,
)
from pagert.geometry import describe
from pagert.sizes import format_bytes

__all__ = [
    "LINKS",
    "another_pager",
    "cannot_open",
    "foreign_alias",
    "hidden_alias",
    "operands_do_not_fit",
    "out_of_frames",
    "refused",
    "tier_full",
    "transfer_failed",
    "waiting",
]

LINKS = (
    "fill of a zero page",
    "move within the device tier",
    "copy from host to device",
    "read from flash to device",
    "read from flash to host",
    "copy from device to host",
    "write from device to flash",
    "write from host to flash",
)
"""What a transfer on each link of the core is."""

_MODE_NAMES = ("read", "update", "overwrite")


def cannot_open(
    number: int, page_bytes: int, page_count: int, transfer_pages_max: int, frames: Sequence[int]
) -> Exception:
    """Return the error of a pump that cannot be opened, with `number` as its errno."""
    if number == EINVAL:
        return ConfigurationError(
            f"the core refuses page_bytes={page_bytes}, page_count={page_count}, "
            f"frames={list(frames)}, transfer_pages_max={transfer_pages_max}; page_bytes is a "
            "power of two from 4096 on, and the device and one more tier have frames"
        )
    if number == ENOMEM:
        return MemoryError(
            f"no memory for the page table of {page_count} pages; lower flash_bytes or raise "
            "page_bytes"
        )
    return OSError(
        number,
        f"the pump cannot start: {os.strerror(number)}; raise the limit for threads (ulimit -u) "
        "or for open files (ulimit -n)",
    )


def refused(code: int, reserved_pages: int) -> Exception:
    """Return the error of a call that the core refuses without anything being wrong with a tier."""
    if code == E_PAGES:
        return PagertError(f"the virtual address space is full: {reserved_pages} pages are reserved; delete tensors")
    if code == E_STALE:
        return PagertError("the region was released")
    if code == E_STATE:
        return PagertError("an operator holds these pages; leave resident() first")
    return ValueError(f"the core refused the call: code {code}")


def out_of_frames(needed_frames: int, unpinned_frames: int, capacity_frames: int, page_bytes: int) -> OutOfFrames:
    """Return the error of a pin that needs more frames than it can ever get."""
    error = OutOfFrames(
        f"a pin needs {needed_frames} frames ({format_size(needed_frames * page_bytes)}); "
        f"{unpinned_frames} of {capacity_frames} are unpinned; raise device_bytes or use smaller "
        "tensors"
    )
    error.needed_bytes = needed_frames * page_bytes
    error.unpinned_bytes = unpinned_frames * page_bytes
    error.capacity_bytes = capacity_frames * page_bytes
    return error


def tier_full(usage: Sequence[tuple[int, int, int]], page_bytes: int) -> TierFull:
    """Return the error of changed pages that have nowhere to go."""
    return TierFull(
        "changed pages must leave the device, and no tier below has room for them "
        f"(used: {_describe(usage, page_bytes)}); nothing is lost; raise flash_bytes or "
        "host_bytes, or delete tensors"
    )


def transfer_failed(
    number: int,
    link: str,
    offset_bytes: int | None,
    folder: str | None,
    usage: Sequence[tuple[int, int, int]],
    page_bytes: int,
) -> TransferError:
    """Return the error of a transfer that came back with `number` as its errno.

    `offset_bytes` is where it was in the flash file, None where that is not known.
    """
    reason = "checksum mismatch, read twice" if number == EBADMSG else os.strerror(number)
    where = "" if offset_bytes is None else f" at byte {offset_bytes} of the flash file"
    return TransferError(
        number,
        f"{link} failed{where}: {reason} (used: {_describe(usage, page_bytes)}); changed pages "
        "stay where they are",
        folder,
    )


def waiting(
    what: str,
    seconds: float,
    in_flight: int,
    oldest: tuple[str, int, float] | None,
    folder: str | None,
) -> str:
    """Return what is told of a long wait. `oldest` is the link, the bytes and the age in seconds of a transfer."""
    told = "nothing is in flight"
    if oldest is not None:
        link, size_bytes, age = oldest
        told = (
            f"the oldest of {in_flight} transfers in flight is a {link} of "
            f"{format_size(size_bytes)}, {age:.1f} s old"
        )
    where = "" if folder is None else f"; flash lies in {folder}"
    return f"{what} has waited {seconds:.3g} s: {told}{where}"


def _describe(usage: Sequence[tuple[int, int, int]], page_bytes: int) -> str:
    return ", ".join(
        f"{name} {format_size(used * page_bytes)} of {format_size(capacity * page_bytes)}"
        for name, (capacity, used, _) in zip(("device", "host", "flash"), usage, strict=True)
        if capacity
    )


# Of operations.


def another_pager(name: str, tensors: Sequence[torch.Tensor], tensor: torch.Tensor) -> ForeignTensor:
    """Return the error of an operator whose operands belong to two pagers."""
    first = f": {describe(tensors[0])} and {describe(tensor)}" if tensors else ""
    return ForeignTensor(
        f"{name}: tensors of two pagers meet{first}; move one over with `pager.tensor(other)`"
    )


def operands_do_not_fit(
    name: str, tensors: Sequence[torch.Tensor], modes: Sequence[int], error: OutOfFrames
) -> OutOfFrames:
    """Return an error of the pump's with the operands that were asked for."""
    operands = "; ".join(
        f"{describe(tensor)} ({_MODE_NAMES[mode]})" for tensor, mode in zip(tensors, modes, strict=True)
    )
    message = [f"{name}: its paged operands do not fit the device tier together: {operands}"]
    needed, capacity, unpinned = error.needed_bytes, error.capacity_bytes, error.unpinned_bytes
    if needed is not None and capacity is not None and unpinned is not None:
        message.append(
            f"they need {format_bytes(needed)} in pages; {format_bytes(unpinned)} of "
            f"{format_bytes(capacity)} are not pinned"
        )
    message.append("raise device_bytes, leave `resident()` contexts earlier, or use smaller tensors")
    explained = OutOfFrames("; ".join(message))
    explained.needed_bytes, explained.capacity_bytes = needed, capacity
    explained.unpinned_bytes = unpinned
    return explained


def foreign_alias(name: str) -> UnsupportedOperator:
    """Return the error of an operator that gave away device memory that is none of its operands'."""
    return UnsupportedOperator(
        f"{name}: it returned an alias of device memory that is not its operand's"
    )


def hidden_alias(name: str, result: torch.Tensor) -> UnsupportedOperator:
    """Return the error of a result that keeps an alias of paged bytes where no view can stand for it."""
    layout = "nested" if result.is_nested else result.layout
    return UnsupportedOperator(
        f"{name}: its result, of layout {layout} and dtype {result.dtype}, would keep an alias of "
        "paged bytes; give it a plain copy of the operand"
    )
