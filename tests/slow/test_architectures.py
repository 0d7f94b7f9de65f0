# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers train in pages as they do in plain memory. Run by `make test-slow`."""

from __future__ import annotations

import gc
import random

import numpy
import pytest
import torch
from pagers import open_pager
from stepping import same

from pagert.errors import UnsupportedOperator, UnsupportedTensor

pytest.importorskip("transformers", reason="the demo extra is not installed")
import architectures

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
REFUSALS = (UnsupportedOperator, UnsupportedTensor)
STEPS = 2
outcomes: dict[str, str] = {}


def plain_run(name):
    """Train the first model class of an architecture that can be built and run as plain tensors."""
    reasons = []
    for task, kind in architectures.candidates(name):
        try:
            torch.manual_seed(0)
            config = architectures.tiny_config(name)
            model = architectures.build(kind, config)
            given = architectures.inputs(task, model)
            losses = train(model, given)
        except Exception as error:
            reasons.append(f"{kind.__name__}: {type(error).__name__}: {str(error)[:100]!r}")
            continue
        if not all(torch.isfinite(loss) for loss in losses):
            reasons.append(f"{kind.__name__}: the loss is not finite")
            continue
        return kind, config, given, model, losses
    pytest.skip("no plain twin: " + "; ".join(reasons))


def train(model, given):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(1)
    numpy.random.seed(1)  # masks of some speech models
    random.seed(1)
    for _ in range(STEPS):
        loss = architectures.loss_of(model(**given))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", architectures.names())
def test_an_architecture_trains_in_pages_as_in_plain_memory(name, tmp_path):
    kind, config, given, plain, expected = plain_run(name)
    torch.manual_seed(0)
    model = architectures.build(kind, config)
    state_bytes = 4 * sum(parameter.nbytes for parameter in model.parameters())
    largest = max(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    # A quarter of the state, or what the largest operator takes: a weight with gradient and both moments.
    device_bytes = max(state_bytes // 4, 5 * largest + (64 << 10)) // 4096 * 4096
    with open_pager("host", device_bytes, 4096) as pager:
        try:
            pager.page_(model)
            losses = train(model, given)
        except REFUSALS as error:
            outcomes[name] = f"refused: {error}"
            assert "paged" in str(error) or "page" in str(error)
            return
        assert all(same(one, other) for one, other in zip(expected, losses)), "losses"
        ones, others = plain.state_dict(), model.state_dict()
        assert list(ones) == list(others)
        for key, value in ones.items():
            assert same(value, others[key]), key
        del losses, others, model
    outcomes[name] = "same"
    gc.collect()


def test_most_architectures_could_be_tried(capsys):
    refused = {name: text for name, text in outcomes.items() if text != "same"}
    with capsys.disabled():
        print(f"\n{len(outcomes)} architectures, {len(outcomes) - len(refused)} the same")
        for name, text in refused.items():
            print(f"{name}: {text}")
    if len(outcomes) < len(architectures.names()) // 4:
        pytest.skip("run with the others only")
    assert len(outcomes) >= 150
