# SPDX-License-Identifier: Apache-2.0
"""Steps in the backward pass: bitwise those after it, whatever the loop does."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from backward_steps import (
    LEAST,
    SOME,
    adamw,
    build,
    check_loop,
    check_same,
    loss_of,
    simply,
    values,
)
from pagers import MIB, REAL, check_idle
from pagers import open_pager as open_set_up
from stepping import open_pager, plain, same
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from pagert.tensor import PagedTensor
from pagert.training.stepping import Stepping
from pagert.training.used_gradient import UsedGradient

pytestmark = pytest.mark.skipif(not REAL, reason="the core's extension modules are not built")


@pytest.fixture
def pager():
    with open_pager(device_bytes=SOME) as pager:
        yield pager
        assert pager.pump.check() == 0 and pager.stats().held_bytes == 0


# Optimizers.

OTHERS = ["ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
OPTIMIZERS = {
    f"{name}-{way}": (name, {} if way == "default" else {way: True})
    for name in ["SGD", "Adam", "AdamW", "Adagrad", *OTHERS]
    for way in ["default", "foreach", *(["fused"] if name not in OTHERS else [])]
}
OPTIMIZERS["SGD-momentum"] = ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1})
OPTIMIZERS["SGD-momentum-fused"] = ("SGD", {"momentum": 0.9, "dampening": 0.1, "fused": True})
OPTIMIZERS["AdamW-amsgrad"] = ("AdamW", {"amsgrad": True, "maximize": True, "fused": True})
OPTIMIZERS["RMSprop-all"] = ("RMSprop", {"momentum": 0.9, "centered": True})
OPTIMIZERS["Adam-tensor-rate"] = ("Adam", {"lr": torch.tensor(0.01), "fused": True})


def ten_steps(model, optimizer, stepping):
    losses = simply(model, optimizer, stepping, steps=10)
    if isinstance(stepping, Stepping):
        for parameter, state in optimizer.state.items():
            if type(parameter) is PagedTensor:
                assert all(type(v) is PagedTensor for v in state.values() if torch.is_tensor(v) and v.dim())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_of_any_optimizer_are_bitwise_those_after_the_backward_pass(name):
    kind, options = OPTIMIZERS[name]

    def make(parameters):
        return getattr(torch.optim, kind)(parameters, **{"lr": 0.01, **copy.deepcopy(options)})

    assert 2 * sum(one.nbytes for one in build().parameters()) > 8 * LEAST
    with open_pager(device_bytes=LEAST) as pager:
        check_loop(pager, ten_steps, make)
        assert pager.stats().evictions > 0 and pager.pump.check() == 0


@pytest.mark.parametrize("kind", [adamw, torch.optim.Adafactor, torch.optim.RAdam])
def test_no_stale_view_is_kept_from_one_update_to_the_next(kind):
    pager = open_set_up("fake", LEAST, 4096)  # evicts at every unpin, and poisons what it leaves
    check_loop(pager, simply, kind)
    check_idle(pager)


@pytest.mark.parametrize("device_bytes", [LEAST, 8 * SOME])  # in ranges, and in one piece
def test_an_update_moves_the_version_of_its_parameter(device_bytes):
    with open_pager(device_bytes=device_bytes) as pager:
        model = build(pager)
        pager.step_in_backward(adamw(model.parameters()))  # nobody holds the optimizer: no step
        version = model.wide[0].weight._version
        loss_of(model, 0).backward()
        assert model.wide[0].weight._version == version
        model.zero_grad()
        optimizer = adamw(model.parameters())
        pager.step_in_backward(optimizer)
        loss_of(model, 0).backward()
        assert model.wide[0].weight._version > version


def test_muon_is_bitwise_the_steps_after_the_backward_pass(pager):
    def make(parameters):
        return torch.optim.Muon([one for one in parameters if one.ndim == 2], lr=0.01)

    check_loop(pager, simply, make)


@pytest.mark.parametrize("below", ["host", "flash", "host-flash"])
@pytest.mark.parametrize("policy", ["lru", "lookahead"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_any_tiers_give_the_same_bits(tmp_path, below, policy, accumulate):
    settings = {"host_bytes": 64 * 4096 if "host-" in below else 32 * MIB if "host" in below else None}
    if "flash" in below:
        settings |= {"flash_path": tmp_path, "flash_bytes": 32 * MIB}
    with open_pager(device_bytes=100 * 4096, policy=policy, **settings) as pager:
        check_loop(pager, accumulating(accumulate), accumulate=accumulate)
        assert pager.stats().evictions > 0


# Loops.


def accumulating(count):
    def loop(model, optimizer, stepping):
        losses = []
        for seed in range(3):
            optimizer.zero_grad()
            for part in range(count):
                loss = loss_of(model, 10 * seed + part) / count
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
        return losses

    return loop


def in_groups(parameters):
    parameters = list(parameters)
    return adamw(
        [
            {"params": parameters[:4], "lr": 0.02},
            {"params": parameters[4:], "weight_decay": 0.3, "betas": (0.8, 0.9)},
        ]
    )


def with_zeroed_gradients(model, optimizer, stepping):
    losses = []
    for seed in range(5):  # `sometimes` gets no gradient in odd steps, and is updated with zeros
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, seed, sometimes=seed % 2 == 0)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def with_the_modules_zeroed_gradients(model, optimizer, stepping):
    losses = []
    for seed in range(3):
        loss = loss_of(model, seed, sometimes=seed != 1)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        model.zero_grad(set_to_none=False)
    return losses


def without_some_gradients(model, optimizer, stepping):
    losses = []
    for seed in range(5):
        loss = loss_of(model, seed, sometimes=seed % 2 == 1)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def following_schedules(model, optimizer, stepping):
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=9),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    ]
    losses = []
    for seed in range(4):
        loss = loss_of(model, seed)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
    return losses


def with_a_closure(model, optimizer, stepping):
    losses = []
    for seed in range(3):

        def closure(seed=seed):
            optimizer.zero_grad()
            loss = loss_of(model, seed)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        losses.append(optimizer.step(closure=closure).item())
    return losses


def adding_a_group(model, optimizer, stepping):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:4]
    losses = simply(model, optimizer, stepping, steps=2)
    optimizer.zero_grad()
    model.zero_grad()
    optimizer.add_param_group({"params": list(model.wide[0].parameters()), "lr": 0.05})
    return losses + simply(model, optimizer, stepping)


def freezing_and_unfreezing(model, optimizer, stepping):
    losses = simply(model, optimizer, stepping, steps=2)
    model.body[0].requires_grad_(False)
    model.body[1].requires_grad_(True)
    losses += simply(model, optimizer, stepping, steps=2)
    model.body[0].requires_grad_(True)
    return losses + simply(model, optimizer, stepping, steps=2)


def resuming(model, optimizer, stepping):
    losses = simply(model, optimizer, stepping, steps=2)
    stream = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], stream)
    losses += simply(model, optimizer, stepping, steps=2)
    stream.seek(0)
    weights, state = torch.load(stream, weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return losses + simply(model, optimizer, stepping)


def checkpointing(reentrant):
    def around(part, x):
        return checkpoint(part, x, use_reentrant=reentrant)

    def loop(model, optimizer, stepping):
        return simply(model, optimizer, stepping, around=around)

    return loop


def with_passes_that_only_accumulate(model, optimizer, stepping):
    losses = []
    for seed in range(3):
        with stepping.accumulating():
            for part in range(seed):
                loss = loss_of(model, 10 * seed + part)
                loss.backward(retain_graph=True)
                loss.backward()
        loss = loss_of(model, 10 * seed + 9)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def with_a_gradient_penalty(model, optimizer, stepping):
    losses = []
    for seed in range(3):
        loss = loss_of(model, seed)
        weights = [model.wide[0].weight, model.body[0].weight]
        found = torch.autograd.grad(loss, weights, create_graph=True)
        loss = loss + sum(one.square().sum() for one in found)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def keeping_the_graph(model, optimizer, stepping):
    losses = []
    for seed in range(3):
        with stepping.accumulating():
            loss = loss_of(model, seed)
            loss.backward(create_graph=True)
        sum(one.grad.square().sum() for one in model.body[0].parameters()).backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def copying_the_model(model, optimizer, stepping):
    losses = simply(model, optimizer, stepping, steps=2)
    loss_of(model, 5).backward()
    optimizer.step()
    copied = copy.deepcopy(model)
    optimizer.zero_grad()
    losses += simply(copied, torch.optim.SGD(copied.parameters(), lr=0.1), None, steps=2)
    return losses + simply(model, optimizer, stepping, steps=2)


LOOPS = [with_zeroed_gradients, with_the_modules_zeroed_gradients, without_some_gradients, following_schedules,
         with_a_closure, adding_a_group, freezing_and_unfreezing, resuming, with_passes_that_only_accumulate,
         with_a_gradient_penalty, keeping_the_graph, copying_the_model]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_training_is_bitwise_that_without_when(pager, loop):
    check_loop(pager, loop)


def test_groups_keep_their_settings(pager):
    check_loop(pager, simply, in_groups)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_leave_the_numbers_alone(pager, reentrant):
    check_loop(pager, checkpointing(reentrant))


def test_a_gradient_from_a_pass_within_a_pass_waits_for_the_step(pager):
    model = build(pager)
    optimizer = adamw(model.parameters())
    pager.step_in_backward(optimizer)
    loss_of(model, 0, around=checkpointing_part).backward()
    # body[0] is used twice, in two passes of their own.
    assert type(model.body[0].weight.grad) is PagedTensor
    assert type(model.sometimes.weight.grad) is UsedGradient


def checkpointing_part(part, x):
    return checkpoint(part, x, use_reentrant=True)


@pytest.mark.parametrize("paged_first", [False, True])
def test_paging_and_unpaging_between_steps_leave_the_numbers_alone(pager, paged_first):
    def loop(model, optimizer, stepping):
        losses = [] if paged_first else simply(model, optimizer, stepping, steps=2)
        if stepping is not None:
            pager.page_(model, min_bytes=1024)
        losses += simply(model, optimizer, stepping)
        if stepping is not None:
            pager.unpage_(model)
        return losses + simply(model, optimizer, stepping, steps=2)

    found = []
    for stepped in (False, True):
        model = build()
        optimizer = adamw(model.parameters())
        stepping = pager.step_in_backward(optimizer) if stepped else None
        found.append({"losses": torch.tensor(loop(model, optimizer, stepping)), **values(model, optimizer)})
    check_same(*found)


def test_removing_it_steps_after_the_backward_pass_again(pager):
    def loop(model, optimizer, stepping):
        losses = simply(model, optimizer, stepping, steps=2)
        if isinstance(stepping, Stepping):
            stepping.remove()
            stepping.remove()
            loss_of(model, 0).backward()
            assert type(model.body[0].weight.grad) is PagedTensor
            optimizer.zero_grad()
            pager.step_in_backward(optimizer).remove()
        return losses + simply(model, optimizer, stepping, steps=2)

    check_loop(pager, loop)


def test_two_optimizers_of_one_model_step_side_by_side(pager):
    found = []
    for paged in (False, True):
        model = build(pager if paged else None)
        parameters = list(model.parameters())
        optimizers = [adamw(parameters[:5]), torch.optim.SGD(parameters[5:], lr=0.1, momentum=0.9)]
        if paged:
            held = [pager.step_in_backward(optimizer) for optimizer in optimizers]
            assert len(held) == 2
        losses = []
        for seed in range(3):
            loss = loss_of(model, seed)
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append({"losses": torch.tensor(losses), **values(model, optimizers[0])})
    check_same(*found)


def test_parameters_that_share_bytes_wait_for_the_step(pager):
    found = []
    for paged in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
        model[2].weight = nn.Parameter(model[0].weight.data)
        if paged:
            pager.page_(model, min_bytes=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if paged:
            pager.step_in_backward(optimizer)
        for _ in range(3):
            model(torch.ones(2, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: plain(one) for name, one in model.named_parameters()})
    check_same(*found)


# What it is for.


def test_gradients_never_become_pages(pager, monkeypatch):
    model = build(pager)
    optimizer = adamw(model.parameters())
    pager.step_in_backward(optimizer)
    simply(model, optimizer, None, steps=1)
    made = []
    reserve = PagedTensor._reserve.__func__

    def counted(cls, *arguments):
        made.append(arguments)
        return reserve(cls, *arguments)

    monkeypatch.setattr(PagedTensor, "_reserve", classmethod(counted))
    before = plain(model.body[0].weight)
    loss_of(model, 1).backward()
    assert made == [] and not same(before, model.body[0].weight)
    for parameter in model.parameters():
        if type(parameter) is PagedTensor and parameter.requires_grad:
            assert type(parameter.grad) is UsedGradient
    optimizer.step()
    assert made == []


def test_fewer_bytes_move_than_with_steps_after_the_backward_pass():
    moved = {}
    for stepped in (False, True):
        with open_pager(device_bytes=SOME) as pager:
            model = build(pager)
            optimizer = adamw(model.parameters())
            if stepped:
                pager.step_in_backward(optimizer)
            simply(model, optimizer, None, steps=4)
            pager.reset_stats()
            simply(model, optimizer, None, steps=4)
            stats = pager.stats()
            moved[stepped] = stats.host_to_device_bytes + stats.device_to_host_bytes
    assert 0 < moved[True] < 0.9 * moved[False]


def test_hooks_of_the_optimizer_run_once_a_step(pager):
    model = build(pager)
    optimizer = adamw(model.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *a: calls.append("before"))
    pager.step_in_backward(optimizer)
    optimizer.register_step_post_hook(lambda *a: calls.append("after"))
    everybody = register_optimizer_step_post_hook(lambda *a: calls.append("all"))
    try:
        simply(model, optimizer, None, steps=2)
    finally:
        everybody.remove()
    assert calls == ["before", "after", "all"] * 2


def test_frozen_parameters_have_no_state_and_are_written_below_once():  # B5
    with open_pager(device_bytes=24 * 4096) as pager:
        torch.manual_seed(0)
        base = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
        low = nn.ModuleList(nn.ParameterList([torch.randn(64, 1), torch.zeros(1, 64)]) for _ in base)
        model = pager.page_(nn.ModuleList([base, low]), min_bytes=0)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        pager.step_in_backward(optimizer)

        def step():
            x = torch.ones(2, 64)
            for layer, (a, b) in zip(base, low):
                x = torch.tanh(layer(x) + x @ a @ b)
            x.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        pager.flush()
        pager.reset_stats()
        for _ in range(3):
            step()
        stats = pager.stats()
        trained = 4 * 3 * 4096 * len(low) * 2  # weights and moments, a page each, of the three steps and to spare
        assert stats.evictions > 0 and stats.device_to_host_bytes <= trained
        for parameter in base.parameters():
            assert parameter.grad is None and parameter not in optimizer.state


def test_the_optimizer_and_its_parameters_are_freed_by_counting(pager):
    model = build(pager)
    optimizer = adamw(model.parameters())
    stepping = pager.step_in_backward(optimizer)
    simply(model, optimizer, None, steps=1)
    watched = [weakref.ref(optimizer), weakref.ref(model.wide[0].weight)]
    gc.disable()
    try:
        del optimizer
        loss_of(model, 1).backward()  # parameters work on without it
        assert type(model.wide[0].weight.grad) is PagedTensor
        del model
        assert [one() for one in watched] == [None, None]
    finally:
        gc.enable()
    stepping.remove()


def test_micro_batches_that_are_fewer_than_said_are_completed_by_the_step(pager):
    check_loop(pager, accumulating(2), accumulate=5)


def test_kept_gradients_survive_an_evict_between_micro_batches(pager):  # B3
    def loop(model, optimizer, stepping):
        for seed in range(2):
            for part in range(3):
                loss_of(model, 10 * seed + part).backward()
                for one in model.parameters():
                    if type(one.grad) is PagedTensor:
                        one.grad.evict()
            optimizer.step()
            optimizer.zero_grad()
        return []

    check_loop(pager, loop, accumulate=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_layouts_and_dtypes_are_bitwise_the_steps_after(dtype):
    found = []
    for paged in (False, True):
        with open_pager(device_bytes=64 * 4096) as pager:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(8, 24, 3), nn.Tanh(), nn.Conv2d(24, 24, 3), nn.Tanh(), nn.Conv2d(24, 4, 3))
            model = model.to(dtype).to(memory_format=torch.channels_last)
            if paged:
                pager.page_(model, min_bytes=0)
            optimizer = adamw(model.parameters())
            if paged:
                pager.step_in_backward(optimizer)
            for seed in range(3):
                torch.manual_seed(seed)
                x = torch.randn(2, 8, 9, 9, dtype=dtype).to(memory_format=torch.channels_last)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(values(model, optimizer))
            state = [(k, v.stride()) for kinds in optimizer.state.values() for k, v in kinds.items()]
            found[-1]["state"] = torch.tensor([*repr(state).encode()])
    check_same(*found)
