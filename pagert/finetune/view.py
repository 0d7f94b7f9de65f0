# SPDX-License-Identifier: Apache-2.0
"""What a job shows while it runs: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagert.config import format_bytes
from pagert.errors import PagerClosed
from pagert.finetune.report import StepReport
from pagert.stats import Stats

if TYPE_CHECKING:
    from pagert import Pager

__all__ = ["View"]

_TIERS = ("device", "host", "flash")


class View:
    """Progress of one job. A context manager; the terminal is as before afterwards.

    Parameters
    ----------
    title
        What is trained, in a few words.
    steps
        How many steps there will be.
    plain
        Lines even on a terminal.
    console
        Where to write; `None`: standard output.
    """

    def __init__(
        self, title: str, steps: int, *, plain: bool = False, console: Console | None = None
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._title, self._steps = title, steps
        self._phase = ""
        self._done: list[StepReport] = []
        self._pager: Pager | None = None
        self._live = None
        if self._console.is_terminal and not plain:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.watch(None)
        if self._live is not None:
            self._live.stop()

    def watch(self, pager: Pager | None) -> None:
        """Show the tiers of `pager` from now on; `None`: no tiers."""
        self._pager = pager

    def phase(self, text: str) -> None:
        """Say what happens now."""
        self._phase = text
        if self._live is None:
            self.line(text)

    def step(self, step: StepReport) -> None:
        """Show a step that was done."""
        self._done.append(step)
        if self._live is None:
            self.line(self._step_line())

    def line(self, text: str) -> None:
        """Write a line that stays."""
        self._console.print(text, markup=False)
        self._console.file.flush()

    def _stats(self) -> Stats | None:
        pager = self._pager  # once: the job's thread takes it away while the view's is drawing
        if pager is None:
            return None
        try:
            return pager.stats()
        except PagerClosed:
            return None

    def _step_line(self) -> str:
        step = self._done[-1]
        parts = [
            f"step {len(self._done)}/{self._steps}",
            f"loss {step.loss:.4f}",
            f"{step.seconds:.2f} s",
            f"{step.tokens / step.seconds:.1f} tokens/s",
        ]
        stats = self._stats()
        if stats is not None:
            for name in _TIERS:
                tier = getattr(stats, name)
                if tier is not None:
                    parts.append(
                        f"{name} {format_bytes(tier.used_bytes)} of "
                        f"{format_bytes(tier.capacity_bytes)}"
                    )
            parts.append(f"moved {_moved(stats)}")
        return "  ".join(parts)

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        count = len(self._done)
        table.add_row(
            "step",
            ProgressBar(total=self._steps, completed=count, width=40),
            f"{count}/{self._steps}",
        )
        stats = self._stats()
        if stats is not None:
            for name in _TIERS:
                tier = getattr(stats, name)
                if tier is not None:
                    bar = ProgressBar(
                        total=max(1, tier.capacity_bytes), completed=tier.used_bytes, width=40
                    )
                    use = f"{format_bytes(tier.used_bytes)} of {format_bytes(tier.capacity_bytes)}"
                    table.add_row(name, bar, f"{use}, peak {format_bytes(tier.peak_bytes)}")
            table.add_row("moved", _moved(stats))
        if self._done:
            step = self._done[-1]
            table.add_row("loss", f"{step.loss:.4f}", f"{step.tokens / step.seconds:.1f} tokens/s")
        return Group(Text(f"{self._title}: {self._phase}", style="bold"), table)


def _moved(stats: Stats) -> str:
    parts = []
    if stats.flash is not None:
        parts.append(
            f"flash {format_bytes(stats.flash_read_bytes)} read, "
            f"{format_bytes(stats.flash_written_bytes)} written"
        )
    if stats.host is not None:
        parts.append(
            f"host {format_bytes(stats.host_to_device_bytes)} in, "
            f"{format_bytes(stats.device_to_host_bytes)} out"
        )
    return "; ".join(parts)
