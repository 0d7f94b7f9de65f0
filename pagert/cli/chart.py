# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of `pagert simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pagert.cli.budgets import MOVED, Row
from pagert.config import format_bytes
from pagert.errors import ConfigurationError

__all__ = ["bars", "check_drawing", "draw", "table"]

_FORMATS = (".png", ".svg")


def table(rows: Sequence[Row], policies: Sequence[str], known: dict[str, Any]) -> Table:
    """Bytes a step of each budget and policy; beside 'min', how far the others are from it."""
    with_host = any(row.host_bytes for row in rows)
    most = max((_sum(row, policy) for row in rows for policy in policies), default=0.0)
    unit, scale = next(
        ((name, size) for name, size in (("GiB", 2**30), ("MiB", 2**20)) if most >= size),
        ("KiB", 2**10),
    )
    made = Table(
        title=f"{known['trace']}: {unit} moved in {_which(known['finished_steps'])}",
        title_justify="left",
        box=SIMPLE_HEAD,  # narrow: with a host tier it must still fit 80 columns
        padding=(0, 0, 0, 1),
    )
    made.add_column("device", justify="right", no_wrap=True)
    if with_host:
        made.add_column("host", justify="right", no_wrap=True)
    made.add_column("policy", no_wrap=True)
    titles = ["fetched", "written", "sum"] + ["flash read", "flash written"] * with_host
    for title in titles:
        made.add_column(title, justify="right")
    if "min" in policies:
        made.add_column("of min", justify="right")
    for row in rows:
        for number, policy in enumerate(policies):
            fetched, written, *flash = (row.moved_bytes(policy, what) for what in MOVED)
            moved = [fetched, written, fetched + written] + flash * with_host
            cells = [f"{size / scale:.2f}" for size in moved]
            if "min" in policies:
                least = _sum(row, "min")
                cells.append(f"{_sum(row, policy) / least:.2f}" if least else "-")
            place = [format_bytes(row.device_bytes)] + [format_bytes(row.host_bytes)] * with_host
            made.add_row(
                *(place if number == 0 else [""] * len(place)), policy, *cells,
                end_section=policy == policies[-1],
            )  # fmt: skip
    return made


def _which(step_count: int) -> str:
    """Name the steps that `Simulation.steady_steps` takes."""
    if step_count == 0:
        return "the whole trace"
    numbers = range(1, step_count + 1)
    steady = numbers[2:-1] or numbers[1:-1] or numbers[-1:]
    if len(steady) == 1:
        return f"step {steady[0]} of {step_count}"
    return f"the mean of steps {steady[0]} to {steady[-1]} of {step_count}"


def bars(rows: Sequence[Row], policies: Sequence[str], width: int) -> Text:
    """A bar for each budget and policy: fetched, then written bytes a step."""
    labels = [
        f"{format_bytes(row.device_bytes)}{f' + {format_bytes(row.host_bytes)}' if row.host_bytes else ''}"
        for row in rows
    ]
    margin = max(map(len, labels)) + max(map(len, policies)) + 3
    most = max((_sum(row, policy) for row in rows for policy in policies), default=0.0)
    scale = max(width - margin - 12, 10) / most if most else 0.0
    text = Text("\nbytes moved a step: █ fetched  ▒ written\n")
    for row, label in zip(rows, labels):
        for number, policy in enumerate(policies):
            place = label if number == 0 else ""
            text.append(f"{place:>{margin - max(map(len, policies)) - 2}} {policy:<{max(map(len, policies))}} ")
            fetched = round(row.moved_bytes(policy, "fetched") * scale)
            both = round(_sum(row, policy) * scale)
            text.append("█" * fetched, "cyan")
            text.append("▒" * (both - fetched), "magenta")
            text.append(f" {format_bytes(_sum(row, policy))}\n")
    return text


def check_drawing(path: Path) -> None:
    """Refuse what cannot be drawn before the work begins."""
    if path.suffix not in _FORMATS:
        raise ConfigurationError(f"--plot {path}: the name ends in {' or '.join(_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--plot {path}: its folder does not exist; create it")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed; pip install matplotlib, or leave --plot out"
        ) from None


def draw(rows: Sequence[Row], policies: Sequence[str], path: Path) -> None:
    """Draw fetched and written bytes a step over the device budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, policy in enumerate(policies):
        for host in dict.fromkeys(row.host_bytes for row in rows):
            chosen = sorted(
                (row for row in rows if row.host_bytes == host), key=lambda row: row.device_bytes
            )
            budgets = [row.device_bytes / 2**20 for row in chosen]
            beside = f", host {format_bytes(host)}" if host else ""
            for what, line in (("fetched", "-"), ("written", "--")):
                sizes = [row.moved_bytes(policy, what) / 2**30 for row in chosen]
                axes.plot(
                    budgets, sizes, line, color=f"C{number}", marker=".", label=f"{policy}, {what}{beside}"
                )
    axes.set_xlabel("device budget, MiB")
    axes.set_ylabel("moved a step, GiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _sum(row: Row, policy: str) -> float:
    return row.moved_bytes(policy, "fetched") + row.moved_bytes(policy, "written")
