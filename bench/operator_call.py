# SPDX-License-Identifier: Apache-2.0
"""What an operator on resident paged tensors costs beside plain PyTorch and an empty dispatch wrapper.

The wrapper is a tensor subclass whose `__torch_dispatch__` replaces each operand by the plain tensor it
holds and calls the operator: the least that any subclass pays. What it returns is plain, views too, while a
view of pages is paged. Operands are small, so that the call is all there is. The three kinds take turns,
in another order each round, so that whatever else the machine does hits all of them alike; the ratio is
that of the medians over all rounds. The last row is a whole training step of a tiny language model, where
the pages also get the gradients: each is moved there as soon as autograd has produced it.

    python bench/operator_call.py [--smoke] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pagert

sys.path.insert(0, str(Path(__file__).parent))
from _machine import machine_facts, spread
from _operators import KINDS, LISTS, OPERATORS, converters, count_operators, training_step

LIMIT = 1.3  # what is asked for, paged / wrapper


Clock = Callable[[], float]


def microseconds(call: Callable[[], Any], repeats: int, clock: Clock = time.perf_counter) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats * 1e6


def compare(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    repeats: int | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Time one call of each kind in turn, `rounds` times; about a millisecond at a time."""
    if repeats is None:
        repeats = max(1, min(300, int(1000 / microseconds(calls["wrapper"], 3))))
    for call in calls.values():
        microseconds(call, repeats)
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    order = list(calls)
    for _ in range(rounds):
        for kind in order:
            times[kind].append(microseconds(calls[kind], repeats, clock))
        order.append(order.pop(0))
    row: dict[str, Any] = {kind: spread(values) for kind, values in times.items()}
    row["ratio"] = row["paged"]["median"] / row["wrapper"]["median"]
    row["ratios"] = spread([p / w for p, w in zip(times["paged"], times["wrapper"])])
    return row


def show(name: str, row: dict[str, Any], limit: float | None = LIMIT) -> None:
    columns = "".join(f"{row[kind]['median']:>10.2f}" for kind in KINDS)
    beyond = row["paged"]["median"] - row["wrapper"]["median"]
    mark = "" if limit is None or row["ratio"] <= limit else f"  above {limit}"
    print(f"{name:<16}{columns}{beyond:>10.2f}{row['ratio']:>10.2f}{mark}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, for the suite")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    rounds, layers = (3, 1) if options.smoke else (301, 8)
    torch.set_num_threads(1)
    facts = machine_facts(".")
    for name, value in facts.items():
        print(f"{name:>16}: {value}")
    print(
        f"\n{'us per call':<16}{'plain':>10}{'wrapper':>10}{'paged':>10}{'beyond':>10}{'ratio':>10}"
    )
    rows = {}
    with pagert.Pager(device_bytes="32MiB", host_bytes="32MiB", page_bytes="4KiB") as pager:
        with torch.no_grad():
            for name, prepare in OPERATORS.items():
                kinds = converters(pager, lists=name in LISTS)
                calls = {kind: prepare(convert) for kind, convert in kinds.items()}
                rows[name] = compare(calls, rounds)
                show(name, rows[name])
        steps = {kind: training_step(kind, pager, layers) for kind in KINDS}
        for step in steps.values():
            step()  # makes the optimizer's state
        step_row = compare(steps, rounds, 1) | count_operators(steps["paged"])
        show("training step", step_row, None)
        # A step is long enough to be interrupted: the processor time of all threads beside it.
        step_row["processor"] = compare(steps, rounds, 1, time.process_time)
        show("  processor time", step_row["processor"], None)
        del calls, steps, step
    processor = step_row["processor"]
    beyond = processor["paged"]["median"] - processor["wrapper"]["median"]
    step_row["beyond_per_paged_operator"] = beyond / step_row["paged_operators"]
    print(
        f"\nof the step's {step_row['operators']} operators, {step_row['paged_operators']} have a paged "
        f"operand: {step_row['beyond_per_paged_operator']:.2f} us of processor time each beyond the wrapper"
    )
    figures = {"machine": facts, "limit": LIMIT, "operators": rows, "training_step": step_row}
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))
    return figures


if __name__ == "__main__":
    main()
