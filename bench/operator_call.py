# SPDX-License-Identifier: Apache-2.0
"""What an operator on resident paged tensors costs beside plain PyTorch and an empty dispatch wrapper.

The wrapper is a tensor subclass whose `__torch_dispatch__` replaces each operand by the plain tensor it
holds and calls the operator: the least that any subclass pays. Operands are small, so that the call is
all there is. The three kinds take turns, round by round, in one run.

    python bench/operator_call.py [--smoke] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pagert

sys.path.insert(0, str(Path(__file__).parent))
from _machine import machine_facts

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda x, y: x.add_(1),
    "mul": lambda x, y: x * y,
    "mm": lambda x, y: x @ y,
    "addcdiv_": lambda x, y: x.addcdiv_(y, y),
    "view": lambda x, y: x.view(-1),
}


class Wrapper(torch.Tensor):
    """The empty dispatch wrapper."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)
        wrapper.plain = plain
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[a.plain if type(a) is cls else a for a in args], **(kwargs or {}))


def microseconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a run of a second, for the suite")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    rounds, repeats = (3, 50) if options.smoke else (15, 3000)
    torch.set_num_threads(1)
    facts = machine_facts(".")
    for name, value in facts.items():
        print(f"{name:>16}: {value}")
    print(f"\n{'us per call':<12}{'plain':>8}{'wrapper':>9}{'paged':>8}{'paged / wrapper':>17}")
    rows = {}
    with torch.no_grad(), pagert.Pager(device_bytes="4MiB", host_bytes="16MiB") as pager:
        first, second = torch.rand(16, 16) + 1, torch.rand(16, 16) + 1
        kinds = {
            "plain": (first, second),
            "wrapper": (Wrapper(first.clone()), Wrapper(second.clone())),
            "paged": (pager.tensor(first), pager.tensor(second)),
        }
        for name, operator in OPERATORS.items():
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(rounds):
                for kind, (x, y) in kinds.items():
                    times[kind].append(microseconds(lambda: operator(x, y), repeats))  # noqa: B023
            row = {kind: statistics.median(values) for kind, values in times.items()}
            row["ratio"] = statistics.median(
                paged / wrapper for paged, wrapper in zip(times["paged"], times["wrapper"])
            )
            rows[name] = row
            print(
                f"{name:<12}{row['plain']:>8.2f}{row['wrapper']:>9.2f}{row['paged']:>8.2f}"
                f"{row['ratio']:>17.2f}"
            )
    figures = {"machine": facts, "operators": rows}
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))
    return figures


if __name__ == "__main__":
    main()
