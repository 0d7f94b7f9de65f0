# SPDX-License-Identifier: Apache-2.0
"""The integer program of the optimum, for SciPy's solver (HiGHS).

Variables: pages kept over each gap, frames left free at each operator, and for each epoch of several gaps that
begins dirty the pages that are written back, which are as many as leave in the gap in which most do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagert.errors import ConfigurationError
from pagert.simulation.uses import Epoch, Uses

__all__ = ["shares_a_write", "solve"]

_SECONDS = 120.0  # then the best schedule so far and the bound so far


def shares_a_write(epoch: Epoch) -> bool:
    """Whether pages that leave in several gaps are written in the first of them only."""
    return epoch.dirty and len(epoch.gaps) > 1


def solve(
    uses: Uses, costly: list[tuple[int, int]], room: np.ndarray
) -> tuple[list[int], int]:
    """Pages to keep over each costly gap; the least number of pages that must move because of the rest.

    `costly` has the number of each gap, and what it costs for each page that leaves, but for shared writes.
    """
    try:
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise ConfigurationError(
            "policy 'min' needs SciPy where gaps between uses cost different amounts, and it is not "
            "installed; pip install 'pagert[bench]'"
        ) from None
    several = [epoch for epoch in uses.epochs if shares_a_write(epoch)]
    gap_count, operator_count = len(costly), len(room)
    column = {number: index for index, (number, _) in enumerate(costly)}
    pages = np.array([uses.gaps[number].page_count for number, _ in costly])
    weights = np.array([weight for _, weight in costly])

    total = gap_count + operator_count + len(several)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []

    def put(row: int, at: int, value: float) -> None:
        rows.append(row)
        columns.append(at)
        values.append(value)

    for index, (number, _) in enumerate(costly):
        put(uses.gaps[number].start + 1, index, 1)
        if uses.gaps[number].end < operator_count:
            put(uses.gaps[number].end, index, -1)
    for time in range(operator_count):
        put(time, gap_count + time, 1)
        if time:
            put(time, gap_count + time - 1, -1)
    exact = np.diff(room, prepend=0).astype(float)
    row = operator_count
    least: list[float] = []
    for index, epoch in enumerate(several):
        for number in epoch.gaps:
            put(row, column[number], 1)
            put(row, gap_count + operator_count + index, 1)
            least.append(epoch.page_count)
            row += 1
    matrix = sparse.csr_matrix((values, (rows, columns)), shape=(row, total))
    cost = np.concatenate([-weights, np.zeros(operator_count), np.ones(len(several))])
    upper = np.concatenate([pages, room, [epoch.page_count for epoch in several]])
    found: Any = milp(
        cost,
        constraints=LinearConstraint(
            matrix,
            np.concatenate([exact, least]),
            np.concatenate([exact, np.full(len(least), np.inf)]),
        ),
        bounds=Bounds(np.zeros(total), upper),
        integrality=np.concatenate([np.ones(gap_count), np.zeros(total - gap_count)]),
        options={"time_limit": _SECONDS, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise RuntimeError(f"the solver found no schedule: {found.message}")
    kept = [round(value) for value in found.x[:gap_count]]
    everything = int((weights * pages).sum())  # and no shared write: the program counts those
    return kept, everything + int(np.ceil(found.mip_dual_bound - 1e-6))
