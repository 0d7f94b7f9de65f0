# SPDX-License-Identifier: Apache-2.0
"""Cases of section B: optimizers and gradients. Each test carries the id of its case."""

from __future__ import annotations

import copy

import pytest
import torch
from pagers import MIB
from stepping import same
from torch import nn

import pagert
from pagert._core import core, flash, pump
from pagert.tensor import PagedTensor

X = torch.linspace(-1, 1, 320).reshape(4, 80)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 120), nn.ReLU(), nn.Linear(120, 120), nn.Linear(120, 80))


def run(module, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (module(X) - X.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def states(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


MAKE = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


@pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)
@pytest.mark.parametrize("first", ["optimizer", "pager"])
@pytest.mark.parametrize("name", MAKE)
def test_b1_weights_learn_as_unpaged_ones_in_either_order(make_pager, first, name):
    pager = make_pager(device_bytes=64 * 4096)
    plain, paged = model(), model()
    start = copy.deepcopy(plain.state_dict())
    if first == "optimizer":
        optimizer = MAKE[name](paged.parameters())
        pager.page_(paged, min_bytes=0)
    else:
        optimizer = MAKE[name](pager.page_(paged, min_bytes=0).parameters())
    losses = run(plain, MAKE[name](plain.parameters()), 4)
    assert run(paged, optimizer, 4) == losses and losses[-1] < losses[0]
    for key, value in paged.state_dict().items():
        value.evict()
        assert same(value, plain.state_dict()[key]) and not same(value, start[key])


@pytest.mark.parametrize(
    "below",
    [
        {"host_bytes": 64 * MIB, "device_bytes": 32 * MIB},  # all resident
        {"host_bytes": 64 * MIB},
        {"flash_bytes": 64 * MIB},
        {"host_bytes": MIB // 4, "flash_bytes": 64 * MIB},
    ],
    ids=["resident", "host", "flash", "host-flash"],
)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_b2_loss_curve_and_weights_are_equal_over_all_tiers(tmp_path, below, name):
    settings = {"device_bytes": 64 * 4096, **below}
    if "flash_bytes" in settings:
        settings["flash_path"] = tmp_path
    plain, paged = model(), model()
    with pagert.Pager(device="cpu", page_bytes=4096, **settings) as pager:
        pager.page_(paged, min_bytes=0)
        optimizers = [MAKE[name](m.parameters()) for m in (plain, paged)]
        assert run(plain, optimizers[0], 20) == run(paged, optimizers[1], 20)
        assert all(same(a, b) for a, b in zip(paged.parameters(), plain.parameters(), strict=True))
        assert all(same(a, b) for a, b in zip(*map(states, optimizers), strict=True) if torch.is_tensor(a))
        assert pager.stats().device.peak_bytes <= settings["device_bytes"]


@pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_b6_list_kernels_keep_to_a_budget_of_a_quarter_and_give_the_same_numbers(make_pager, options):
    pager = make_pager(device_bytes=16 * 4096)
    values = [torch.randn(2048) for _ in range(32)]  # 256 KiB of parameters over a device of 64 KiB
    groups = [[nn.Parameter(v.clone()) for v in values], [pager.tensor(v, requires_grad=True) for v in values]]
    for parameters in groups:
        optimizer = torch.optim.AdamW(parameters, lr=0.01, **options)
        for step in range(3):
            for index, p in enumerate(parameters):
                p.grad = torch.full((2048,), float(index + step))
            optimizer.step()
    assert all(same(a, b) for a, b in zip(*groups, strict=True))
    assert pager.stats().device.peak_bytes <= 16 * 4096
    if options != {"fused": True}:  # that kernel has an order of operations of its own
        single = [nn.Parameter(v.clone()) for v in values]
        optimizer = torch.optim.AdamW(single, lr=0.01, foreach=False)
        for step in range(3):
            for index, p in enumerate(single):
                p.grad = torch.full((2048,), float(index + step))
            optimizer.step()
        assert all(torch.allclose(a, b) for a, b in zip(groups[1], single, strict=True))


@pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_b7_clipping_over_all_tiers_is_that_of_plain_gradients(make_pager, norm_type, foreach):
    pager = make_pager(device_bytes=16 * 4096)
    values = [torch.randn(2048) for _ in range(12)]
    plain = [nn.Parameter(torch.zeros(2048)) for _ in values]
    mixed = [
        nn.Parameter(torch.zeros(2048)) if index % 4 == 0 else pager.zeros(2048, requires_grad=True)
        for index in range(len(values))
    ]
    norms = []
    for parameters in (plain, mixed):
        for p, value in zip(parameters, values, strict=True):
            p.grad = value.clone() if type(p) is nn.Parameter else pager.tensor(value)
        norms.append(nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=norm_type, foreach=foreach))
    assert same(*norms) and norms[1].device.type == "cpu"
    for one, other in zip(plain, mixed, strict=True):
        if type(other) is PagedTensor:
            other.grad.evict()
        assert same(one.grad, other.grad)
    mixed[1].grad[3] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(mixed, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)
def test_b12_optimizers_given_wrong_tensors_raise_and_never_crash(pager):
    for change, error in (
        (lambda p: setattr(p, "grad", torch.ones(3)), RuntimeError),
        (lambda p: setattr(p, "grad", torch.ones(40, 40, dtype=torch.float64)), RuntimeError),
        (lambda p: setattr(p, "grad", torch.ones(40, 40, device="meta")), RuntimeError),
        (lambda p: setattr(p, "grad", 3), TypeError),
        (lambda p: p.resident(mode=7).__enter__(), ValueError),
        (lambda p: p.__setattr__("data", None), TypeError),
    ):
        p = pager.tensor(torch.ones(40, 40), requires_grad=True)
        with pytest.raises(error):
            change(p)
        torch.optim.AdamW([p], fused=True).step()  # no gradient: nothing to do
        assert p.sum().item() == 1600
    p = pager.tensor(torch.ones(40, 80), requires_grad=True)
    twin = nn.Parameter(torch.ones(40, 80))
    gradient = torch.arange(3200.0).reshape(80, 40).t()
    p.grad, twin.grad = pager.tensor(torch.arange(3200.0)).view(80, 40).t(), gradient
    for parameter in (p, twin):
        torch.optim.AdamW([parameter], lr=0.1, fused=True).step()
    assert same(p, twin)


BAD = [None, -1, 1 << 70, 3.5, "text", b"bytes", [], (), {}, object(), torch.ones(3), float("nan"), True, 0]


@pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)
def test_b12_entry_points_of_the_core_refuse_wrong_arguments_in_python(pager):
    region = pager.tensor(torch.ones(5000))._region
    points = [
        lambda *a: pager.pump.reserve(a[0]),
        lambda *a: pager.pump.prefetch(*a),
        lambda *a: pager.pump.evict(*a),
        lambda *a: pager.pump.locate(*a),
        lambda *a: pager.pump.prefetch(region, *a[1:]),
        lambda *a: pager.pump.evict(region, *a[1:]),
        lambda *a: pager.pump.locate(region, *a[1:]),
        lambda *a: pump.Pump(*a),
        lambda *a: core.Core(*a),
        lambda *a: core.memory_bytes(*a),
        lambda *a: flash.crc32c(*a[:2]),
        lambda *a: flash.FlashFile(*a),
        lambda *a: flash.CopyEngine(a).close(),
    ]
    refused = 0
    for point in points:
        for one in BAD:
            for other in BAD:
                try:
                    point(one, other, one)
                except Exception as error:
                    refused += 1
                    assert not isinstance(error, AttributeError) or "object has no" in str(error)
    assert refused > len(points) * len(BAD)
    assert pager.tensor(torch.ones(10)).sum().item() == 10
