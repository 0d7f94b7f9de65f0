# SPDX-License-Identifier: Apache-2.0
"""A tensor-paging runtime for PyTorch: device memory, DRAM and flash as one address space."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        "pagert runs on Linux only: it needs O_DIRECT, eventfd and the kernel's memory calls; "
        f"this machine is {sys.platform}"
    )

from pagert.config import Config
from pagert.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigurationError,
    ConfigurationTypeError,
    ForeignTensor,
    OutOfFrames,
    PagerClosed,
    PagertError,
    StepError,
    TierFull,
    TraceError,
    TransferError,
    TransferTimeout,
    UnsupportedOperator,
    UnsupportedTensor,
)
from pagert.stats import Stats, TierStats

if TYPE_CHECKING:
    from pagert.files import save
    from pagert.pager import Pager
    from pagert.simulation import Simulation, simulate
    from pagert.tensor import PagedTensor
    from pagert.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "Config",
    "ConfigurationError",
    "ConfigurationTypeError",
    "ForeignTensor",
    "OutOfFrames",
    "PagedTensor",
    "Pager",
    "PagerClosed",
    "PagertError",
    "Simulation",
    "Stats",
    "StepError",
    "TierFull",
    "TierStats",
    "Trace",
    "TraceError",
    "TransferError",
    "TransferTimeout",
    "UnsupportedOperator",
    "UnsupportedTensor",
    "get_include",
    "save",
    "simulate",
]


def get_include() -> str:
    """Return the folder of the C headers, for a compiler's -I option.

    Examples
    --------
    >>> import os, pagert
    >>> os.path.isfile(os.path.join(pagert.get_include(), "pagert", "core.h"))
    True
    """
    package = os.path.dirname(os.path.abspath(__file__))
    installed = os.path.join(package, "include")
    # An editable install runs from the source tree, where the headers lie beside the package.
    return (
        installed if os.path.isdir(installed) else os.path.join(os.path.dirname(package), "include")
    )


def __getattr__(name: str) -> Any:
    # Loaded at first use: `pagert.get_include()` and the settings need no extension modules.
    if name == "Pager":
        from pagert.pager import Pager

        return Pager
    if name == "PagedTensor":
        from pagert.tensor import PagedTensor

        return PagedTensor
    if name == "Trace":
        from pagert.trace import Trace

        return Trace
    if name == "save":
        from pagert.files import save

        return save
    if name in ("Simulation", "simulate"):
        from pagert import simulation

        return getattr(simulation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
