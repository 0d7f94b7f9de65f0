# SPDX-License-Identifier: Apache-2.0
"""A model whose embedding, and head, are three times the device tier trains as the plain one does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from pagers import MIB, REAL
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pagert
from pagert.tensor import PagedTensor

pytestmark = pytest.mark.skipif(not REAL, reason="trains over the real pump")

VOCABULARY, WIDTH = 6144, 128  # 3 MiB in float32
DEVICE_BYTES = MIB


class Model(nn.Module):
    """Of GPT's kind: an embedding, a block, a head that is tied or not."""

    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, 0, 0.05)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        logits = self.head(self.norm(self.block(self.embed(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class LargestPlain(TorchDispatchMode):
    """The largest storage of a plain result of any operator."""

    size_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for one in results if isinstance(results, (list, tuple)) else [results]:
            if type(one) is torch.Tensor:
                self.size_bytes = max(self.size_bytes, one.untyped_storage().nbytes())
        return results


def losses_of(model, optimizer, sequences, accumulate=1):
    losses = []
    for step in range(2):
        optimizer.zero_grad(set_to_none=step > 0)
        for part in range(accumulate):
            torch.manual_seed(10 * step + part)
            loss = model(torch.randint(VOCABULARY, (sequences, 16)))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def train(make, tied, sequences=2, accumulate=1, page=False):
    torch.manual_seed(0)
    model = Model(tied)
    if not page:
        losses = losses_of(model, make(model.parameters()), sequences, accumulate)
        return losses, [one.detach() for one in model.parameters()]
    with pagert.Pager(device="cpu", device_bytes=DEVICE_BYTES, page_bytes=4096, host_bytes=48 * MIB) as pager:
        pager.page_(model)
        optimizer = make(model.parameters())
        largest = LargestPlain()
        with largest:
            losses = losses_of(model, optimizer, sequences, accumulate)
        assert largest.size_bytes <= DEVICE_BYTES, "a part of the large weights was plain memory"
        assert type(model.embed.weight.grad) is PagedTensor
        pager.flush()
        stats = pager.stats()
        assert stats.device.peak_bytes <= DEVICE_BYTES and stats.held_bytes == 0
        pager.unpage_(model)
    return losses, [one.detach() for one in model.parameters()]


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_embedding_of_three_times_the_device_trains_bitwise_the_same(make, tied):
    losses, weights = train(make, tied)
    found, trained = train(make, tied, page=True)
    assert found == losses
    for one, other in zip(trained, weights, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_the_embedding_are_accumulated_in_pages():
    losses, weights = train(OPTIMIZERS["SGD"], True, accumulate=3)
    found, trained = train(OPTIMIZERS["SGD"], True, accumulate=3, page=True)
    assert found == losses
    for one, other in zip(trained, weights, strict=True):
        assert torch.equal(one, other)


def test_logits_that_are_larger_than_the_device_are_paged_too():
    # 128 tokens by 6144 classes: as large as the embedding.
    losses, weights = train(OPTIMIZERS["SGD"], True, sequences=8)
    found, trained = train(OPTIMIZERS["SGD"], True, sequences=8, page=True)
    torch.testing.assert_close(found, losses)
    for one, other in zip(trained, weights, strict=True):
        torch.testing.assert_close(one, other)


STEPS = {
    "AdamW, amsgrad, fused": lambda one: torch.optim.AdamW([one], 1e-2, amsgrad=True, fused=True),
    "Adagrad fused": lambda one: torch.optim.Adagrad([one], 1e-2, fused=True),
    "SGD fused": lambda one: torch.optim.SGD([one], 1e-2, momentum=0.9, nesterov=True, fused=True),
    "NAdam": lambda one: torch.optim.NAdam([one], 1e-2),
    "RMSprop for each": lambda one: torch.optim.RMSprop([one], 1e-2, centered=True, foreach=True),
    "Rprop": lambda one: torch.optim.Rprop([one], 1e-2),
    "Adamax": lambda one: torch.optim.Adamax([one], 1e-2, maximize=True),
}


@pytest.mark.parametrize("waits", [True, False], ids=["deferred", "at once"])
@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_optimizers_update_one_weight_larger_than_the_device(make, waits):
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(333, 301, generator=generator) for _ in range(3))
    ours = nn.Parameter(start.clone())
    with pagert.Pager(
        device="cpu", device_bytes=128 * 1024, page_bytes=4096, host_bytes=8 * MIB, defer_updates=waits
    ) as pager:
        paged = nn.Parameter(pager.tensor(start))
        for parameter, optimizer in ((ours, make(ours)), (paged, make(paged))):
            for gradient in gradients:
                parameter.grad = pager.tensor(gradient) if parameter is paged else gradient.clone()
                optimizer.step()
        assert torch.equal(torch.empty_like(start).copy_(paged.detach()), ours.detach())
        assert pager.stats().device.peak_bytes <= 128 * 1024
