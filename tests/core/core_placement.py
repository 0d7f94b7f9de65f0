# SPDX-License-Identifier: Apache-2.0
"""Brute force: can a pin be placed among frames that do not move? Small frame counts only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join page ranges (first, end) that share a page; having one frame, it makes them one run."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((first, end))
    return merged


def pack(runs: Sequence[int], gaps: Sequence[int]) -> bool:
    """Whether runs of these lengths fit into gaps of these lengths, none across two gaps."""
    if not runs:
        return True
    longest, *rest = sorted(runs, reverse=True)
    tried = set()
    for index, gap in enumerate(gaps):
        if gap < longest or gap in tried:
            continue
        tried.add(gap)
        if pack(rest, [*gaps[:index], gap - longest, *gaps[index + 1 :]]):
            return True
    return False


def placeable(frame_count: int, held: Mapping[int, int], ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether every range can have a contiguous run of frames while `held` pages stay in place.

    Parameters
    ----------
    frame_count : int
        Device frames.
    held : mapping of page to frame
        Pages that pins hold already. A range that contains some is bound to where they lie.
    ranges : iterable of (first_page, end_page)
        What the pin asks for. Pages that are resident but not held can move or leave.
    """
    taken = {frame: page for page, frame in held.items()}
    loose = []
    for first, end in merge_ranges(ranges):
        bases = {held[page] - (page - first) for page in range(first, end) if page in held}
        if not bases:
            loose.append(end - first)
            continue
        if len(bases) > 1:
            return False
        base = bases.pop()
        if base < 0 or base + (end - first) > frame_count:
            return False
        for page in range(first, end):
            if taken.setdefault(base + page - first, page) != page:
                return False
    gaps = []
    length = 0
    for frame in range(frame_count + 1):
        if frame < frame_count and frame not in taken:
            length += 1
        else:
            gaps.append(length)
            length = 0
    return pack(loose, [gap for gap in gaps if gap])
