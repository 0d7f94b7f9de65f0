# SPDX-License-Identifier: Apache-2.0
"""Stock optimizers on a paged transformer: bitwise the plain run, under every budget and set-up."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from pagers import REAL
from torch import nn

from pagert.tensor import PagedTensor

STEPS = 20
PAGE_BYTES = 4096

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Transformer(nn.Module):
    """A small language model: tied embeddings, a frozen layer, tensors of many sizes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[1].requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def build():
    torch.manual_seed(0)
    return Transformer()


def train(model, optimizer, steps=range(STEPS), accumulate=1):
    losses = []
    for step in steps:
        torch.manual_seed(1000 + step)
        optimizer.zero_grad()
        for _ in range(accumulate):
            tokens = torch.randint(96, (2, 12))
            loss = nn.functional.cross_entropy(
                model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def state_of(model, optimizer):
    """Everything that training produced, as plain bytes."""
    values = {
        name: bytes(p.detach().clone().cpu().__array__().tobytes())
        for name, p in model.named_parameters()
    }
    for index, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                values[f"{index}.{key}"] = value.detach().clone().__array__().tobytes()
    return values


@pytest.fixture(scope="module")
def expected():
    """Losses and state of the plain run, by optimizer."""
    results = {}
    for name, make in OPTIMIZERS.items():
        model = build()
        optimizer = make(model.parameters())
        results[name] = (train(model, optimizer), state_of(model, optimizer))
    return results


# The operands of the largest operator take 15 pages (AMSGrad, 3 pages each); everything about 300.
ONE_OPERATOR, SOME, ALL = 16, 64, 512
CASES = [("fake", ONE_OPERATOR)]
if REAL:
    CASES += [
        (setup, frames) for setup in ("host", "host-flash") for frames in (ONE_OPERATOR, SOME, ALL)
    ]
    CASES += [("flash", ONE_OPERATOR), ("flash", ALL)]


@pytest.mark.parametrize(("make_pager", "frames"), CASES, indirect=["make_pager"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bitwise_the_plain_run(make_pager, expected, name, frames):
    pager = make_pager(device_bytes=frames * PAGE_BYTES, page_bytes=PAGE_BYTES)
    model = pager.page_(build(), min_bytes=0)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = train(model, optimizer)
    assert losses == expected[name][0]
    assert state_of(model, optimizer) == expected[name][1]
    for parameter in model.parameters():
        assert type(parameter) is PagedTensor
        if not parameter.requires_grad:
            assert parameter.grad is None and parameter not in optimizer.state
        else:
            assert type(parameter.grad) is PagedTensor
            state = optimizer.state[parameter]
            assert all(type(v) is PagedTensor for k, v in state.items() if k != "step")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_built_before_paging_is_bitwise_the_plain_run(pager, expected, name):
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    pager.page_(model, min_bytes=0)
    assert train(model, optimizer) == expected[name][0]
    assert state_of(model, optimizer) == expected[name][1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_paging_and_unpaging_between_steps_is_bitwise_the_plain_run(pager, expected, name):
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = train(model, optimizer, range(7))
    pager.page_(model, min_bytes=0)
    losses += train(model, optimizer, range(7, 13))
    pager.unpage_(model)
    losses += train(model, optimizer, range(13, STEPS))
    assert losses == expected[name][0]
    assert state_of(model, optimizer) == expected[name][1]


def test_accumulated_gradients_are_bitwise_the_plain_run(make_pager):
    results = []
    for paged in (False, True):
        model = build()
        if paged:
            make_pager(device_bytes=16 * PAGE_BYTES).page_(model, min_bytes=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=6)
        losses = []
        for step in range(5):
            losses += train(model, optimizer, [step], accumulate=3)
            scheduler.step()
        results.append((losses, state_of(model, optimizer)))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd-foreach"])
def test_resumed_run_is_bitwise_the_uninterrupted_one_and_plain_loads_paged(pager, expected, name):
    model = pager.page_(build(), min_bytes=0)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = train(model, optimizer, range(9))
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    for paged in (True, False):
        stream.seek(0)
        saved = torch.load(stream, weights_only=True)
        resumed = build()
        if paged:
            pager.page_(resumed, min_bytes=0)
        resumed.load_state_dict(saved["model"])
        again = OPTIMIZERS[name](resumed.parameters())
        again.load_state_dict(saved["optimizer"])
        assert losses + train(resumed, again, range(9, STEPS)) == expected[name][0]
        assert state_of(resumed, again) == expected[name][1]


# SparseAdam takes sparse gradients only; LBFGS and Muon have rules of their own and come below.
OTHERS = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("foreach", [False, True])
def test_other_optimizers_are_bitwise_the_plain_run(make_pager, name, foreach):
    results = []
    for paged in (False, True):
        model = build()
        if paged:
            make_pager(device_bytes=SOME * PAGE_BYTES).page_(model, min_bytes=0)
        optimizer = getattr(torch.optim, name)(model.parameters(), foreach=foreach)
        results.append((train(model, optimizer, range(3)), state_of(model, optimizer)))
    assert results[0] == results[1]


def test_quasi_newton_optimizer_is_bitwise_the_plain_run(pager):
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(40, 40)
        if paged:
            pager.page_(model, min_bytes=0)
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.1, max_iter=5, line_search_fn="strong_wolfe"
        )
        x = torch.randn(8, 40)

        def closure(model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad()
            loss = (model(x) - x).square().sum()
            loss.backward()
            return loss

        results.append([optimizer.step(closure).item() for _ in range(4)])
    assert results[0] == results[1]


def test_average_of_weights_follows_the_paged_model(pager):
    model = pager.page_(build(), min_bytes=0)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    plain = build()
    plain_average = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            train(m, optimizer, [step])
        average.update_parameters(model)
        with torch.no_grad():
            for target, source in zip(plain_average.parameters(), plain.parameters(), strict=True):
                target.copy_(source) if step == 0 else target.lerp_(source, 0.1)
    for one, other in zip(average.module.parameters(), plain_average.parameters(), strict=True):
        assert type(one) is PagedTensor and torch.allclose(one + 0, other, atol=1e-6)


def test_frozen_weights_are_written_below_once(make_pager):
    pager = make_pager(device_bytes=24 * PAGE_BYTES, page_bytes=PAGE_BYTES)
    if not hasattr(pager.stats(), "flash"):
        pytest.skip("the fake runtime counts no transfers")
    model = pager.page_(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), min_bytes=0
    ).requires_grad_(False)
    x = torch.randn(2, 64)
    expected = model(x)
    pager.flush()
    pager.reset_stats()
    for _ in range(3):
        assert torch.equal(model(x), expected)
    stats = pager.stats()
    assert (
        stats.evictions > 0 and stats.device_to_host_bytes == 0 and stats.flash_written_bytes == 0
    )
