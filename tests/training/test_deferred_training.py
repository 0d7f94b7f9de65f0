# SPDX-License-Identifier: Apache-2.0
"""Training whose optimizer's kernels wait: bitwise the plain run, whatever comes between two steps."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from pagers import MIB, REAL
from stepping import adamw, open_pager, plain, same, waits
from torch import nn

import pagert

pytestmark = pytest.mark.skipif(not REAL, reason="the fake runtime defers nothing")

WIDTH = 96


@pytest.fixture
def pager():
    with open_pager() as pager:
        yield pager


def build():
    """Tied, shared and frozen weights; with AdamW's state about 1 MiB."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.embed = nn.Embedding(50, WIDTH)
    model.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    model.norm = nn.LayerNorm(WIDTH)
    model.head = nn.Linear(WIDTH, 50, bias=False)
    model.head.weight = model.embed.weight
    model.body[2].requires_grad_(False)
    return model


def loss_of(model, seed):
    torch.manual_seed(1000 + seed)
    tokens = torch.randint(50, (2, 9))
    x = model.embed(tokens)
    for layer in model.body:
        x = x + torch.tanh(layer(x))
    out = model.head(model.norm(x))
    return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def values(model, optimizer):
    """All that training leaves, by name, as plain copies."""
    found = {name: plain(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"{name}.grad"] = plain(parameter.grad)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = plain(value)
    return found


def check_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not same(one[name], other[name])] == []


def run(pager, loop, make=adamw, **options):
    """Call `loop` with a model and its optimizer; return all that it left. The paged one has deferred something."""
    model = build()
    if pager is not None:
        pager.page_(model, min_bytes=0)
    optimizer = make(model.parameters(), **options)
    losses = loop(model, optimizer)
    if pager is not None:
        assert any(waits(parameter) for parameter in model.parameters())
    found = values(model, optimizer)
    found["losses"] = torch.tensor(losses or [])
    return found


def step(model, optimizer, seed, accumulate=1, set_to_none=True):
    optimizer.zero_grad(set_to_none=set_to_none)
    total = 0.0
    for part in range(accumulate):
        loss = loss_of(model, 10 * seed + part)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def simply(model, optimizer):
    return [step(model, optimizer, seed) for seed in range(4)]


def with_gradients_kept(model, optimizer):
    return [step(model, optimizer, seed, set_to_none=False) for seed in range(4)]


def accumulating(model, optimizer):
    return [step(model, optimizer, seed, accumulate=3) for seed in range(3)]


def accumulating_without_end(model, optimizer):
    losses = []
    for seed in range(4):  # gradients of all steps so far, which the update before must not miss
        loss = loss_of(model, seed)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def stepping_twice(model, optimizer):
    losses = simply(model, optimizer)
    optimizer.step()
    optimizer.step()
    return losses


def changing_the_rate(model, optimizer):
    losses = []
    for seed in range(4):
        losses.append(step(model, optimizer, seed))
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5
            group["weight_decay"] = 0.3 - group["weight_decay"]
    return losses


def following_a_schedule(model, optimizer):
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=9)
    losses = []
    for seed in range(4):
        losses.append(step(model, optimizer, seed))
        scheduler.step()
    return losses


def clipping(model, optimizer):
    losses = []
    for seed in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses += [loss.item(), norm.item()]
        # And once more what the step was given, which waits to be read.
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
    optimizer.step()
    return losses


def forgetting_the_gradients(model, optimizer):
    losses = []
    for seed in range(4):
        losses.append(step(model, optimizer, seed))
        for parameter in model.parameters():
            parameter.grad = None
    return losses


def forward_without_gradients(model, optimizer):
    losses = []
    for seed in range(3):
        losses.append(step(model, optimizer, seed))
        with torch.inference_mode():
            losses.append(loss_of(model, 100 + seed).item())
    optimizer.step()
    return losses


def averaging(model, optimizer):
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    losses = []
    for seed in range(3):
        losses.append(step(model, optimizer, seed))
        average.update_parameters(model)
    losses.append(loss_of(average.module, 50).item())
    optimizer.step()
    return losses


def copying_the_model(model, optimizer):
    losses = simply(model, optimizer)
    losses.append(loss_of(copy.deepcopy(model), 50).item())
    optimizer.step()
    return losses


LOOPS = [simply, with_gradients_kept, accumulating, accumulating_without_end, stepping_twice,
         changing_the_rate, following_a_schedule, clipping, forgetting_the_gradients,
         forward_without_gradients, averaging, copying_the_model]  # fmt: skip


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_training_is_bitwise_the_plain_run_when(pager, loop, tensor_rate):
    def rate():
        return torch.tensor(0.01) if tensor_rate else 0.01

    check_same(run(None, loop, lr=rate()), run(pager, loop, lr=rate()))


@pytest.mark.parametrize("below", ["host", "flash", "host-flash"])
@pytest.mark.parametrize("policy", ["lru", "lookahead"])
def test_training_over_any_tiers_is_bitwise_the_plain_run(tmp_path, below, policy):
    settings = {
        "host_bytes": 64 * 4096 if "host-" in below else 32 * MIB if "host" in below else None
    }
    if "flash" in below:
        settings |= {"flash_path": tmp_path, "flash_bytes": 32 * MIB}
    with open_pager(device_bytes=80 * 4096, policy=policy, **settings) as pager:
        check_same(run(None, simply), run(pager, simply))
        assert pager.stats().evictions > 0


@pytest.mark.parametrize("make", [adamw, lambda p: torch.optim.SGD(p, 0.05, fused=True)])
@pytest.mark.parametrize("overflow", [(), (1,), (0, 2, 3)])
def test_scaled_gradients_and_skipped_steps_are_bitwise_the_plain_run(pager, make, overflow):
    def scaled(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        losses = []
        for seed in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, seed)
            scaler.scale(loss).backward()
            if seed in overflow:
                with torch.no_grad():
                    model.body[0].weight.grad[3, 5] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            losses += [loss.item(), scaler.get_scale()]
            # The kernel unscales the gradients in place.
            losses.append(model.body[1].weight.grad.abs().sum().item())
        return losses

    check_same(run(None, scaled, make), run(pager, scaled, make))


def test_unpaged_model_has_its_updates_and_training_goes_on(pager):
    results = []
    for paged in (False, True):
        model = build()
        if paged:
            pager.page_(model, min_bytes=0)
        optimizer = adamw(model.parameters())
        simply(model, optimizer)
        if paged:
            assert any(waits(parameter) for parameter in model.parameters())
            pager.unpage_(model)
        results.append(values(model, optimizer))
        for seed in range(4, 6):
            step(model, optimizer, seed)
        if paged:
            pager.page_(model, min_bytes=0)
        for seed in range(6, 8):
            step(model, optimizer, seed)
        results.append(values(model, optimizer))
    check_same(results[0], results[2])
    check_same(results[1], results[3])


def test_paging_another_module_that_shares_weights_finds_the_updates(pager):
    results = []
    for paged in (False, True):
        model = build()
        if paged:
            pager.page_(model, min_bytes=0)
        optimizer = adamw(model.parameters())
        simply(model, optimizer)
        other = nn.Sequential(nn.Linear(WIDTH, WIDTH), model.body[0])
        if paged:
            assert waits(model.body[0].weight)
            pager.page_(other, min_bytes=0)
        torch.manual_seed(5)
        results.append({"out": plain(other(torch.randn(3, WIDTH)))} | values(model, optimizer))
    check_same(*results)


def test_checkpoint_right_after_a_step_resumes_bitwise(pager):
    expected = run(None, lambda *both: [step(*both, seed) for seed in range(7)])
    model = pager.page_(build(), min_bytes=0)
    optimizer = adamw(model.parameters())
    losses = simply(model, optimizer)
    assert any(waits(parameter) for parameter in model.parameters())
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    resumed = pager.page_(build(), min_bytes=0)
    again = adamw(resumed.parameters())
    step(resumed, again, 50)  # what waits of this one is overwritten
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    losses += [step(resumed, again, seed) for seed in range(4, 7)]
    check_same(expected, values(resumed, again) | {"losses": torch.tensor(losses)})


def test_dropped_training_frees_everything_without_the_garbage_collector(pager):
    gc.collect()
    gc.disable()
    try:
        before = pager.stats().reserved_bytes
        model = pager.page_(build(), min_bytes=0)
        optimizer = adamw(model.parameters())
        simply(model, optimizer)
        assert any(waits(parameter) for parameter in model.parameters())
        del model, optimizer
        pager.tensor([1.0]).sum()
        assert pager.stats().reserved_bytes == before
        assert len(pager.deferred) == 0
    finally:
        gc.enable()


# Tight budgets.


def train_within(tmp_path, flash_pages, defer_updates):
    """What training leaves with so much flash, or the error for which it does not fit."""
    settings = {"host_bytes": None, "flash_path": tmp_path, "flash_bytes": flash_pages * 4096}
    try:
        with open_pager(device_bytes=96 * 4096, defer_updates=defer_updates, **settings) as pager:
            model = pager.page_(build(), min_bytes=0)
            optimizer = adamw(model.parameters())
            losses = simply(model, optimizer)
            deferred = len(pager.deferred) > 0
            return values(model, optimizer) | {"losses": torch.tensor(losses)}, deferred
    except pagert.TierFull:
        return None, False


def test_no_budget_gets_too_tight_by_what_waits(tmp_path):
    expected = run(None, simply)
    fits, deferred = [], []
    for flash_pages in range(130, 420, 10):
        eager, _ = train_within(tmp_path, flash_pages, False)
        found, waited = train_within(tmp_path, flash_pages, True)
        fits.append(eager is not None)
        deferred.append(waited)
        if eager is not None:
            check_same(expected, eager)
            assert found is not None, flash_pages
        if found is not None:
            check_same(expected, found)
    assert {True, False} == set(fits) == set(deferred), (fits, deferred)
