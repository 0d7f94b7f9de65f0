# SPDX-License-Identifier: Apache-2.0
"""A core driven through a whole trace in one call, without bytes."""

from typing import Any

from pagert._core.core import Core

RESERVE: int
RELEASE: int
OPERATOR: int
ACCESS: int
STEP: int
COLUMNS: int

def replay(
    core: Core,
    page_bytes: int,
    kinds: Any,
    modes: Any,
    regions: Any,
    firsts: Any,
    counts: Any,
    handles: Any,
    snapshots: Any,
    backlog_max: int = 0,
) -> None: ...
