# SPDX-License-Identifier: Apache-2.0
"""The calls of operator_call.py for pytest-benchmark: its statistics, files and comparisons over time.

    pytest bench/_pytest_operators.py --benchmark-autosave
    pytest-benchmark compare

Here one kind runs after the other. What is claimed of their ratio comes from operator_call.py, where they
take turns.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import pagert

sys.path.insert(0, str(Path(__file__).parent))
from _operators import KINDS, LISTS, OPERATORS, converters, training_step


@pytest.fixture(autouse=True)
def one_thread():
    """Leave the other threads of PyTorch out of what is measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pager():
    """Open a pager in which everything stays resident."""
    with pagert.Pager(device_bytes="32MiB", host_bytes="32MiB", page_bytes="4KiB") as pager:
        yield pager


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator(benchmark, pager, name, kind):
    benchmark.group = name
    with torch.no_grad():
        call = OPERATORS[name](converters(pager, lists=name in LISTS)[kind])
        benchmark(call)


@pytest.mark.parametrize("kind", KINDS)
def test_training_step(benchmark, pager, kind):
    benchmark.group = "training step"
    step = training_step(kind, pager, layers=8)
    step()
    benchmark(step)
