# SPDX-License-Identifier: Apache-2.0
"""What a job reports at its end: to people as lines, to programs as JSON."""

from __future__ import annotations

import json
import math
import statistics
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagert.config import format_bytes
from pagert.stats import Stats

__all__ = ["MovedBytes", "Report", "StepReport", "loss_bits"]


def loss_bits(loss: float | None) -> str | None:
    """Give the bits of a loss in hexadecimal, which tell NaNs and zeros apart."""
    return None if loss is None else struct.pack(">d", loss).hex()


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step."""

    loss: float
    seconds: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """What was moved between tiers, and how long operators waited for it, in a part of the job."""

    flash_read_bytes: int
    flash_written_bytes: int
    host_to_device_bytes: int
    device_to_host_bytes: int
    stall_seconds: float

    @classmethod
    def of(cls, stats: Stats) -> MovedBytes:
        """Take the counters out of the pager's statistics."""
        return cls(**{name: getattr(stats, name) for name in cls.__dataclass_fields__})

    def since(self, earlier: MovedBytes) -> MovedBytes:
        """Subtract what was moved up to `earlier`."""
        return MovedBytes(
            **{
                name: getattr(self, name) - getattr(earlier, name)
                for name in self.__dataclass_fields__
            }
        )


@dataclass(kw_only=True)
class Report:
    """The state of a job, filled in as it goes, so that an interrupted one has what there was."""

    paged: bool
    model: str = ""
    parameters: int = 0
    weights_bytes: int = 0
    device: str = ""
    planned_steps: int = 0
    steps: list[StepReport] = field(default_factory=list)
    held_out_before: float | None = None
    held_out_after: float | None = None
    stats: Stats | None = None  # the pager's, over the whole job
    moved_in_steps: MovedBytes | None = None
    peak_rss_bytes: int = 0
    weights: dict[str, str] = field(default_factory=dict)  # digests
    out: str | None = None
    ended: str = "unfinished"  # then "finished", "interrupted", or the name of an error
    comparison: dict[str, Any] | None = None

    @property
    def median_step_seconds(self) -> float | None:
        """Median over the steps."""
        return statistics.median(step.seconds for step in self.steps) if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all steps by their time."""
        seconds = sum(step.seconds for step in self.steps)
        return sum(step.tokens for step in self.steps) / seconds if seconds > 0 else None

    def losses(self) -> dict[str, str | None]:
        """Bits of every loss, by what it is the loss of."""
        bits = {f"step {n}": loss_bits(step.loss) for n, step in enumerate(self.steps, start=1)}
        bits["held out before"] = loss_bits(self.held_out_before)
        bits["held out after"] = loss_bits(self.held_out_after)
        return bits

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        kind = "paged" if self.paged else "unpaged"
        steps = f"{len(self.steps)} of {self.planned_steps} steps"
        yield f"{kind} run {self.ended}: {steps}, {self.model} on {self.device}"
        if self.held_out_before is not None:
            after = "not reached" if self.held_out_after is None else f"{self.held_out_after:.4f}"
            yield f"  held-out loss   {self.held_out_before:.4f} before, {after} after"
        if self.steps:
            first, last = self.steps[0].loss, self.steps[-1].loss
            yield f"  training loss   {first:.4f} first step, {last:.4f} last step"
            speed = f"{self.tokens_per_second:.1f} tokens/s"
            yield f"  step time       {self.median_step_seconds:.2f} s median, {speed}"
        if self.stats is not None:
            yield from self._tier_lines(self.stats)
        yield f"  peak RSS        {format_bytes(self.peak_rss_bytes)}"
        if self.out is not None:
            yield f"  tuned model     {self.out}"

    def _tier_lines(self, stats: Stats) -> Iterator[str]:
        for name in ("device", "host", "flash"):
            tier = getattr(stats, name)
            if tier is not None:
                peak, capacity = format_bytes(tier.peak_bytes), format_bytes(tier.capacity_bytes)
                yield f"  {name + ' tier':<14}  peak {peak} of {capacity}"
        if stats.flash is not None:
            read, written = stats.flash_read_bytes, stats.flash_written_bytes
            yield f"  flash moved     {format_bytes(read)} read, {format_bytes(written)} written"
            direct = "direct" if stats.flash_direct else "buffered by the kernel"
            yield f"  flash I/O       {stats.flash_backend}, {direct}"
        if stats.host is not None:
            inward, outward = stats.host_to_device_bytes, stats.device_to_host_bytes
            yield f"  host moved      {format_bytes(inward)} in, {format_bytes(outward)} out"
        if stats.activation_stored_bytes:
            yield f"  activations     {format_bytes(stats.activation_stored_bytes)} went to pages"
        yield f"  stall time      {stats.stall_seconds:.2f} s"
        if self.moved_in_steps is not None and self.steps:
            moved, count = self.moved_in_steps, len(self.steps)
            flash_read = format_bytes(moved.flash_read_bytes / count)
            flash_moved = (
                f"{flash_read} read, {format_bytes(moved.flash_written_bytes / count)} written"
            )
            stalled = f"{moved.stall_seconds / count:.2f} s stalled"
            yield f"  a step          {flash_moved} by flash, {stalled}"

    def as_json(self, settings: dict[str, Any]) -> str:
        """Write everything for programs. Losses that are not finite are null; see `losses_bits`."""
        document = {
            "format": 1,
            "settings": _plain(settings),
            **{name: _plain(getattr(self, name)) for name in self.__dataclass_fields__},
            "median_step_seconds": self.median_step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "losses_bits": self.losses(),
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def write(self, path: Path, settings: dict[str, Any]) -> None:
        """Write `as_json` to a file."""
        path.write_text(self.as_json(settings), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Reduce a value to what JSON has."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
