# SPDX-License-Identifier: Apache-2.0
"""Budgets that `pagert simulate` tries, and what each policy moves with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagert.config import format_bytes, parse_bytes
from pagert.errors import ConfigurationError
from pagert.simulation import Simulation, available_policies, simulate
from pagert.simulation.simulate import POLICIES
from pagert.trace import Trace

__all__ = ["Row", "choose_policies", "choose_rows", "facts", "simulate_row"]

MOVED = ("fetched", "written", "flash_read", "flash_written")


@dataclass(frozen=True)
class Row:
    """One budget, and the simulation of each policy with it."""

    device_bytes: int
    host_bytes: int
    found: dict[str, Simulation]

    def moved_bytes(self, policy: str, what: str) -> float:
        """Bytes a step: `what` is one of `MOVED`."""
        simulation = self.found[policy]
        steps = simulation.steady_steps
        pages = sum(getattr(step, f"{what}_pages") for step in steps)
        return pages * simulation.page_bytes / len(steps)

    def figures(self) -> dict[str, Any]:
        """Everything as plain numbers."""
        return {
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "policies": {
                policy: {
                    **{f"{what}_bytes_per_step": self.moved_bytes(policy, what) for what in MOVED},
                    "hits": simulation.hits,
                    "faults": simulation.faults,
                    **{
                        f"{what}_bytes": getattr(simulation, f"{what}_pages") * simulation.page_bytes
                        for what in MOVED
                    },
                    "lower_bound_bytes": None
                    if simulation.lower_bound_pages is None
                    else simulation.lower_bound_pages * simulation.page_bytes,
                }
                for policy, simulation in self.found.items()
            },
        }


def choose_policies(names: str | None) -> list[str]:
    """Read a list of policies; all that exist by default."""
    exist = available_policies()
    if names is None:
        return list(exist)
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in exist:
            allowed = ", ".join(repr(one) for one in exist)
            why = "is not in this version" if name in POLICIES else "does not exist"
            raise ConfigurationError(f"--policy {name!r} {why}; allowed: {allowed}")
    return chosen


def choose_rows(
    trace: Trace, device_bytes: str | None, host_bytes: str, sweep: int | None
) -> list[tuple[int, int]]:
    """Pages of the device and host tier of each row."""
    hosts = [size // trace.page_bytes for size in _sizes(host_bytes, "--host-bytes")]
    operator, least = trace.largest_operator
    least = max(least, 1)
    if device_bytes is None:
        points = 8 if sweep is None else sweep
        if points < 2:
            raise ConfigurationError(f"--sweep {points}: give a number of budgets, at least 2")
        most = max(trace.peak_pages, least + 1)
        devices = sorted({least + round((most - least) * k / (points - 1)) for k in range(points)})
    else:
        devices = [size // trace.page_bytes for size in _sizes(device_bytes, "--device-bytes")]
        if min(devices) < least:
            raise ConfigurationError(
                f"--device-bytes {format_bytes(min(devices) * trace.page_bytes)} is too small: operator "
                f"{operator} of the trace needs {format_bytes(least * trace.page_bytes)} together; give "
                "at least that"
            )
    return [(device, host) for host in hosts for device in devices]


def simulate_row(trace: Trace, device_pages: int, host_pages: int, policies: list[str]) -> Row:
    """Run every policy with one budget."""
    found = {
        policy: simulate(trace, capacity_pages=device_pages, host_pages=host_pages, policy=policy)
        for policy in policies
    }
    return Row(device_pages * trace.page_bytes, host_pages * trace.page_bytes, found)


def facts(trace: Trace, path: Path) -> dict[str, Any]:
    """What the figures are of."""
    return {
        "trace": path.name,
        "page_bytes": trace.page_bytes,
        "operators": trace.operator_count,
        "page_uses": trace.page_uses,
        "finished_steps": trace.step_count,
        "peak_bytes": trace.peak_pages * trace.page_bytes,
        "metadata": trace.metadata,
    }


def _sizes(text: str, name: str) -> list[int]:
    return [parse_bytes(size.strip(), name=name) for size in text.split(",")]
