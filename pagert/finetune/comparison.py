# SPDX-License-Identifier: Apache-2.0
"""Run the same steps unpaged in a process of its own; compare every loss and weight bit by bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagert.finetune.errors import UnpagedRunFailed
from pagert.finetune.memory import offer_to_kernel_first
from pagert.finetune.settings import Settings

__all__ = ["command_line", "compare_reports", "comparison_lines", "run_unpaged"]


def command_line(settings: Settings) -> list[str]:
    """Write settings as the options of `pagert finetune`."""
    words = []
    for name in Settings.__dataclass_fields__:
        value = getattr(settings, name)
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return words


def run_unpaged(settings: Settings, device: str) -> dict[str, Any]:
    """Run the job without a pager in a child process and return its report.

    Blocks until the child has ended; its progress goes to this process's standard output.

    Raises
    ------
    UnpagedRunFailed
        Where it did not finish, as when the kernel ended it for want of memory.
    """
    with tempfile.TemporaryDirectory(prefix="pagert-compare-") as folder:
        path = Path(folder) / "unpaged.json"
        unpaged = replace(
            settings, device=device, unpaged=True, compare=False, out=None, json=path, plain=True
        )
        command = [sys.executable, "-m", "pagert", "finetune", *command_line(unpaged)]
        process = subprocess.Popen(command)
        try:
            offer_to_kernel_first(process.pid)
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if status != 0 or report is None or report["ended"] != "finished":
        raise UnpagedRunFailed(
            f"the unpaged run {_ending(status)}; nothing can be said about its numbers"
        )
    return report


def compare_reports(paged: dict[str, Any], unpaged: dict[str, Any]) -> dict[str, Any]:
    """Compare two finished reports (as in the JSON file).

    Returns
    -------
    dict
        `bitwise_equal`; `different_losses` and `different_weights`, by name; how many of each were
        compared; `step_time_ratio` and `peak_rss_ratio`, paged by unpaged.
    """
    losses = _differing(paged["losses_bits"], unpaged["losses_bits"])
    weights = _differing(paged["weights"], unpaged["weights"])
    return {
        "bitwise_equal": not losses and not weights,
        "different_losses": losses,
        "different_weights": weights,
        "compared_losses": len(paged["losses_bits"]),
        "compared_weights": len(paged["weights"]),
        "step_time_ratio": _ratio(paged["median_step_seconds"], unpaged["median_step_seconds"]),
        "peak_rss_ratio": _ratio(paged["peak_rss_bytes"], unpaged["peak_rss_bytes"]),
        "unpaged": unpaged,
    }


def comparison_lines(comparison: dict[str, Any]) -> Iterator[str]:
    """Yield a comparison for people; the last line is the verdict."""
    yield "paged against unpaged"
    for what, ratio in (("step time", "step_time_ratio"), ("peak RSS", "peak_rss_ratio")):
        if comparison[ratio] is not None:
            yield f"  {what:<14}  {comparison[ratio]:.2f} of the unpaged run's"
    for kind in ("losses", "weights"):
        different = comparison[f"different_{kind}"]
        named = (
            f": {', '.join(different[:3])}{', ...' if len(different) > 3 else ''}"
            if different
            else ""
        )
        yield f"  {kind:<14}  {len(different)} of {comparison[f'compared_{kind}']} differ{named}"
    yield f"bitwise equal: {'yes' if comparison['bitwise_equal'] else 'no'}"


def _differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    names = list(left) + [name for name in right if name not in left]
    return [
        name for name in names if name not in left or name not in right or left[name] != right[name]
    ]


def _ratio(paged: float | None, unpaged: float | None) -> float | None:
    return paged / unpaged if paged is not None and unpaged else None


def _ending(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        return f"was ended by {name}" + (
            ", which is what happens when memory runs out" if name == "SIGKILL" else ""
        )
    return f"ended with exit status {status}"
