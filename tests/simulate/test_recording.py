# SPDX-License-Identifier: Apache-2.0
"""Traces that a pager records, and that they say what happened."""

from __future__ import annotations

import gc
import pathlib

import pytest
import torch

import pagert
from pagert.trace import Access, Operator, Release, Reserve, Step

PAGE_BYTES = 4096


@pytest.fixture
def pager(tmp_path: pathlib.Path):
    with pagert.Pager(
        device="cpu", device_bytes=64 * PAGE_BYTES, flash_path=tmp_path, flash_bytes="16MiB",
        page_bytes=PAGE_BYTES,
    ) as pager:  # fmt: skip
        yield pager


def test_regions_are_numbered_as_they_appear(pager: pagert.Pager) -> None:
    before = pager.tensor(torch.zeros(3000))
    unused = pager.tensor(torch.ones(1))
    with pager.trace() as trace:
        first = pager.tensor(torch.ones(1024))
        total = first.sum() + before.sum()
        first.add_(1)
        del first, unused
    assert float(total) == 1024
    assert list(trace) == [
        Reserve(0, 1),
        Operator((Access(0, 0, 1, "o"),)),
        Operator((Access(0, 0, 1, "r"),)),
        Reserve(1, 3, stored=True),
        Operator((Access(1, 0, 3, "r"),)),
        Operator((Access(0, 0, 1, "w"),)),
        Release(0),
    ]


def test_an_overwrite_of_a_part_is_an_update_of_its_end_pages(pager: pagert.Pager) -> None:
    tensor = pager.tensor(torch.zeros(5000))
    with pager.trace() as trace:
        tensor[1000:4000].fill_(1.0)
        tensor[1024:5000].fill_(1.0)
        tensor[1:9].fill_(1.0)
    assert [event.accesses for event in trace if type(event) is Operator] == [
        (Access(0, 0, 1, "w"), Access(0, 1, 2, "o"), Access(0, 3, 1, "w")),
        (Access(0, 1, 4, "o"),),
        (Access(0, 0, 1, "w"),),
    ]


def test_steps_of_an_optimizer_are_marked_inside_only(pager: pagert.Pager) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(4)
    optimizer.step()
    with pager.trace() as trace:
        optimizer.step()
    optimizer.step()
    assert list(trace) == [Step()]


def test_two_recordings_at_once_are_refused(pager: pagert.Pager) -> None:
    with pager.trace() as trace:
        with pytest.raises(pagert.PagertError, match="records a trace already"):
            with pager.trace():
                pass
        tensor = pager.tensor(torch.ones(4))
    with pager.trace() as second:
        float(tensor.sum())
    assert trace.operator_count == second.operator_count == 1


def test_an_exception_ends_the_recording_and_keeps_it(pager: pagert.Pager) -> None:
    with pytest.raises(ZeroDivisionError):
        with pager.trace() as trace:
            pager.tensor(torch.ones(4))
            raise ZeroDivisionError
    assert trace.operator_count == 1
    with pager.trace():
        pass


def test_a_simulation_moves_what_the_pager_moved(pager: pagert.Pager) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
    with pager.trace() as trace:
        pager.page_(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(3):
            model(torch.randn(8, 100)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
    stats = pager.stats()
    found = pagert.simulate(
        trace, capacity_pages=pager.config.device_frames, policy=pager.config.policy
    )
    assert (found.hits, found.faults) == (stats.hits, stats.faults)
    assert found.fetched_pages * PAGE_BYTES == stats.flash_read_bytes > 0
    assert found.written_pages * PAGE_BYTES == stats.flash_written_bytes > 0
    assert len(found.steps) == trace.step_count == 3
    assert sum(step.faults for step in found.steps) == found.faults
