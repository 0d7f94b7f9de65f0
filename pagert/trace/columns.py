# SPDX-License-Identifier: Apache-2.0
"""Events as packed rows of numbers. It knows their layout, and nothing of what makes sense."""

from __future__ import annotations

from array import array

import numpy as np

__all__ = ["ACCESS", "LIMIT", "OPERATOR", "RELEASE", "RESERVE", "ROW", "STEP", "Columns"]

# Kinds of rows. An operator is followed by as many accesses as its `count` says.
RESERVE, RELEASE, OPERATOR, ACCESS, STEP = range(5)

LIMIT = 1 << 32

ROW = np.dtype(
    [("kind", "u1"), ("mode", "u1"), ("region", "<u4"), ("first", "<u4"), ("count", "<u4")]
)


class Columns:
    """Rows that grow at the end."""

    def __init__(self) -> None:
        self._kinds = array("B")
        self._modes = array("B")
        self._numbers = array("Q")  # region, first, count of each row
        self._packed: np.ndarray | None = None
        self.access_count = 0

    def __len__(self) -> int:
        return len(self._kinds)

    def append(self, kind: int, mode: int, region: int, first: int, count: int) -> None:
        """Add a row."""
        self._kinds.append(kind)
        self._modes.append(mode)
        self._numbers.extend((region, first, count))
        self._packed = None
        self.access_count += kind == ACCESS

    def packed(self) -> np.ndarray:
        """All rows, of type `ROW`. Do not change it."""
        if self._packed is None:
            rows = np.empty(len(self), ROW)
            numbers = np.array(self._numbers, dtype=np.uint64).reshape(-1, 3)
            rows["kind"], rows["mode"] = self._kinds, self._modes
            for position, name in enumerate(("region", "first", "count")):
                rows[name] = numbers[:, position]
            self._packed = rows
        return self._packed
