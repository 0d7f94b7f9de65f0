# SPDX-License-Identifier: Apache-2.0
"""`pagert simulate`: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagert.cli.budgets import Row

SUMMARY = "Simulate policies on a recorded trace: what is fetched and written with more or less memory."

_SWEEP_POINTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pagert simulate`."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file that Trace.save() has written")
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument(
        "--device-bytes", default=None, metavar="A,B,C", help="budgets of the device tier"
    )
    budgets.add_argument(
        "--sweep", type=int, nargs="?", const=_SWEEP_POINTS, default=None, metavar="N",
        help="N budgets from the least that the trace can run with to the one where everything fits "
        f"(the default, with {_SWEEP_POINTS})",
    )  # fmt: skip
    parser.add_argument(
        "--host-bytes", default="0", metavar="A,B,C", help="budgets of the host tier (none)"
    )
    parser.add_argument(
        "--policy", default=None, metavar="P,Q", help="'lru', 'lookahead', 'min' (all that exist)"
    )
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="write the figures there"
    )
    parser.add_argument(
        "--plot", type=Path, default=None, metavar="FILE",
        help="draw them there too, .png or .svg; needs matplotlib",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Carry out `pagert simulate` and return the exit status."""
    from rich.console import Console
    from rich.progress import track

    from pagert.cli.budgets import choose_policies, choose_rows, facts, simulate_row
    from pagert.cli.chart import bars, check_drawing, draw, table
    from pagert.errors import ConfigurationError
    from pagert.trace import Trace

    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigurationError(f"--json {options.json}: its folder does not exist; create it")
    if options.plot is not None:
        check_drawing(options.plot)
    trace = Trace.load(options.trace)
    policies = choose_policies(options.policy)
    budgets = choose_rows(trace, options.device_bytes, options.host_bytes, options.sweep)
    console = Console()
    progress = Console(stderr=True)
    rows: list[Row] = [
        simulate_row(trace, device_pages, host_pages, policies)
        for device_pages, host_pages in track(
            budgets, "simulating", console=progress, transient=True, disable=not progress.is_terminal
        )
    ]
    known = facts(trace, options.trace)
    console.print(table(rows, policies, known))
    console.print(bars(rows, policies, console.width))
    if options.json is not None:
        figures: dict[str, Any] = {**known, "results": [row.figures() for row in rows]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        draw(rows, policies, options.plot)
    return 0
