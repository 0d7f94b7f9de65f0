# SPDX-License-Identifier: Apache-2.0
"""What a policy did, counted in pages."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Counts"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Pages, of a whole trace or of one step of it. hits + faults: page uses.

    Attributes
    ----------
    hits, faults : int
        Pages that an operator found on the device, and others.
    prefetched_pages : int
        Pages fetched before an operator asked for them, which it then found: hits that cost a fetch.
    fetched_pages, written_pages : int
        Pages that came to the device from the tier below, and that were written from it to there.
    flash_read_pages, flash_written_pages : int
        Pages read from flash and written to it. Without a host tier: as fetched and written.
    """

    hits: int = 0
    faults: int = 0
    prefetched_pages: int = 0
    fetched_pages: int = 0
    written_pages: int = 0
    flash_read_pages: int = 0
    flash_written_pages: int = 0

    @property
    def moved_pages(self) -> int:
        """Pages fetched and written."""
        return self.fetched_pages + self.written_pages

    def __sub__(self, other: Counts) -> Counts:
        return Counts(**{
            field.name: getattr(self, field.name) - getattr(other, field.name)
            for field in fields(Counts)
        })  # fmt: skip

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(Counts)
        })  # fmt: skip
