# SPDX-License-Identifier: Apache-2.0
"""The path of a fault: from the pin of one page that is not there to the operator that may run.

One page at a time, so nothing hides behind anything else. Beside each pin stands the engine alone with the
same single request, waiting for it in the same way, in the same run: what is above that is the pager's own,
the core's decisions and the hand-over between threads. The victims are clean: nothing is written meanwhile.

    python bench/fault.py [--folder DIR] [--smoke] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagert._core.device import CpuDevice
from pagert._core.flash import CopyEngine
from pagert._core.pump import READ, UPDATE, Pump
from pagert.engines.flash import open_flash

sys.path.insert(0, str(Path(__file__).parent))
from _machine import HugeMemory, machine_facts

PAGE_BYTES = 256 << 10
DEVICE_FRAMES = 8
PAGES = 64  # several times the device tier, so that each pin in turn is a fault


class Pinned:
    """Pins of one page each, round and round; all but the first round are clean faults."""

    def __init__(self, pump: Pump) -> None:
        self.pump = pump
        self.region = pump.reserve(PAGES * PAGE_BYTES)
        self.page = 0
        memory = memoryview(pump.arena)
        for page in range(PAGES):
            with pump.pin([(self.region, page * PAGE_BYTES, PAGE_BYTES, UPDATE)]) as pin:
                at = pin.device_bytes[0]
                memory[at : at + PAGE_BYTES] = bytes([page]) * PAGE_BYTES
        pump.flush()

    def __call__(self) -> None:
        self.pump.pin([(self.region, self.page * PAGE_BYTES, PAGE_BYTES, READ)]).release()
        self.page = (self.page + 1) % PAGES


def open_pump(flash: Any = None) -> Pump:
    """Return a pump over the device tier and one more."""
    return Pump(
        CpuDevice(
            device_bytes=DEVICE_FRAMES * PAGE_BYTES,
            host_bytes=0 if flash is not None else 2 * PAGES * PAGE_BYTES,
        ),
        page_bytes=PAGE_BYTES,
        page_count=2 * PAGES,
        flash=flash,
    )


def raw_read(folder: str, memory: HugeMemory) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the flash engine alone: one request of one page, waited for; and how to close it."""
    file = open_flash(folder, capacity_bytes=PAGES * PAGE_BYTES, block_bytes=PAGE_BYTES)
    target = memory.view[:PAGE_BYTES]
    for page in range(PAGES):
        file.run([("write", target, page * PAGE_BYTES)])
    page = 0

    def call() -> None:
        nonlocal page
        assert file.run([("read", target, page * PAGE_BYTES)])[0][0] == 0
        page = (page + 1) % PAGES

    return call, file.close


def raw_copy(memory: HugeMemory) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the copy engine alone, likewise."""
    engine = CopyEngine(2)
    target, pages = memory.view[:PAGE_BYTES], len(memory.view) // PAGE_BYTES
    page = 0

    def call() -> None:
        nonlocal page
        page = page % (pages - 1) + 1
        at = page * PAGE_BYTES
        assert engine.run([("copy", target, memory.view[at : at + PAGE_BYTES])]) == [0]

    return call, engine.close


def measure(calls: dict[str, Callable[[], None]], rounds: int, seed: int) -> dict[str, list[float]]:
    """Microseconds of each call, interleaved: a slow moment of the machine hits all alike."""
    order = random.Random(seed)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for round_index in range(rounds + 10):
        for name in order.sample(list(calls), len(calls)):
            begin = time.perf_counter_ns()
            calls[name]()
            if round_index >= 10:
                taken[name].append((time.perf_counter_ns() - begin) / 1000)
    return taken


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and print; the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".", help="where the files lie (default: here)")
    parser.add_argument("--smoke", action="store_true", help="small and quick: does it run at all")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    facts = machine_facts(chosen.folder)
    for key, value in facts.items():
        print(f"{key:>16}: {value}")

    memory = HugeMemory(PAGES * PAGE_BYTES)
    flash = open_flash(chosen.folder, capacity_bytes=2 * PAGES * PAGE_BYTES, block_bytes=PAGE_BYTES)
    flash_pump, host_pump = open_pump(flash), open_pump()
    read, close_read = raw_read(chosen.folder, memory)
    copy, close_copy = raw_copy(memory)
    resident = host_pump.reserve(PAGE_BYTES)
    on_flash, on_host = Pinned(flash_pump), Pinned(host_pump)

    def hit() -> None:
        host_pump.pin([(resident, 0, PAGE_BYTES, READ)]).release()

    calls = {"fault from flash": on_flash, "flash engine alone": read,
             "fault from host": on_host, "copy engine alone": copy, "hit": hit}  # fmt: skip
    with host_pump.pin([(resident, 0, PAGE_BYTES, UPDATE)]):  # stays while the faults go round
        taken = measure(calls, 100 if chosen.smoke else 5000, chosen.seed)
    faults = {name: pump.state()["counters"]["faults"] for name, pump in
              (("flash", flash_pump), ("host", host_pump))}  # fmt: skip
    assert min(faults.values()) >= len(taken["hit"]), f"some pins found their page: {faults}"
    for pump in (flash_pump, host_pump):
        pump.close()
    close_read()
    close_copy()

    figures: dict[str, Any] = {"machine": facts, "page_bytes": PAGE_BYTES}
    print(
        f"\none page of {PAGE_BYTES >> 10} KiB        microseconds: median   fastest tenth   slowest tenth"
    )
    for name, values in taken.items():
        tenths = statistics.quantiles(values, n=10)
        figures[name] = {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}
        print(f"{name:<24}{figures[name]['median']:20.1f}{tenths[0]:16.1f}{tenths[-1]:16.1f}")
    for fault, raw in (
        ("fault from flash", "flash engine alone"),
        ("fault from host", "copy engine alone"),
    ):
        figures[fault]["ratio"] = figures[fault]["median"] / figures[raw]["median"]
        more = figures[fault]["median"] - figures[raw]["median"]
        print(f"{fault}: {figures[fault]['ratio']:.2f} of the {raw}; {more:+.1f} us")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


if __name__ == "__main__":
    main()
