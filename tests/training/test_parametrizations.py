# SPDX-License-Identifier: Apache-2.0
"""Parametrized modules: registered, assigned to, trained, saved and removed as on plain ones."""

from __future__ import annotations

import copy

import pytest
import torch
from stepping import same
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from pagert.errors import UnsupportedOperator
from pagert.tensor import PagedTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning"),
    pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True),
]


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x):
        return x.triu()


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


KINDS = {
    "symmetric": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "identity inverse": lambda m: parametrize.register_parametrization(m, "weight", Doubled(), unsafe=True),
    "of two": lambda m: parametrize.register_parametrization(
        parametrize.register_parametrization(m, "weight", Doubled(), unsafe=True), "weight", Symmetric()
    ),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}
NEW = [name for name in KINDS if not name.startswith("old")]


def linear():
    torch.manual_seed(0)
    return nn.Linear(48, 48)


def register(name, module):
    torch.manual_seed(1)  # power iterations start at random
    KINDS[name](module)
    return module


def train(module, steps=2):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    torch.manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(torch.randn(4, 48)).square().mean()
        loss.backward()
        optimizer.step()
        del loss


def check(paged, plain):
    left, right = paged.state_dict(), plain.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert same(left[name], right[name]), name
    for one, other in zip(paged.parameters(), plain.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad and one.stride() == other.stride()
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or same(one.grad, other.grad)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", KINDS)
def test_parametrized_module_trains_and_is_saved_as_the_plain_one(pager, name, when):
    plain, paged = register(name, linear()), linear()
    if when == "before":
        pager.page_(register(name, paged), min_bytes=0)
    else:
        register(name, pager.page_(paged, min_bytes=0))
    check(paged, plain)
    train(plain)
    train(paged)
    check(paged, plain)
    again = register(name, pager.page_(nn.Linear(48, 48), min_bytes=0))
    again.load_state_dict(paged.state_dict())
    check_values = zip(again.state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(same(one, other) for one, other in check_values)
    assert any(type(p) is PagedTensor for p in paged.parameters())
    assert same(paged(torch.ones(1, 48)), plain(torch.ones(1, 48)))


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("name", NEW)
def test_removing_parametrizations_leaves_what_the_plain_module_has(pager, name, leave):
    if name in ("weight_norm",) and not leave:
        pytest.skip("PyTorch refuses it for a tensor that is made of several")
    modules = [linear(), pager.page_(linear(), min_bytes=0)]
    before = modules[1].weight
    for module in modules:
        register(name, module)
        train(module)
        module.zero_grad()
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=leave)
    check(modules[1], modules[0])
    if name != "weight_norm":
        assert modules[1].weight is before and type(before) is PagedTensor
    for module in modules:
        train(module)
    check(modules[1], modules[0])


@pytest.mark.parametrize("paged_value", [True, False])
@pytest.mark.parametrize("name", ["symmetric", "weight_norm", "orthogonal"])
def test_assigning_to_a_parametrized_weight_works_as_on_a_plain_module(pager, name, paged_value):
    modules = [register(name, linear()), register(name, pager.page_(linear(), min_bytes=0))]
    torch.manual_seed(3)
    value = torch.linalg.qr(torch.randn(48, 48))[0]
    modules[0].weight = value
    modules[1].weight = pager.tensor(value) if paged_value else value.clone()
    check(modules[1], modules[0])
    for module in modules:
        train(module)
    check(modules[1], modules[0])


def test_cached_parametrization_is_computed_once_and_trains_as_the_plain_one(pager):
    modules = [register("symmetric", linear()), register("symmetric", pager.page_(linear(), min_bytes=0))]
    for module in modules:
        with parametrize.cached():
            (module(torch.ones(2, 48)) + module(torch.ones(2, 48))).sum().backward()
    check(modules[1], modules[0])


def test_set_is_another_look_at_the_same_bytes(pager):
    target, source = pager.tensor(torch.zeros(3)), pager.tensor(torch.arange(8.0))
    version = target._version
    assert target.set_(source) is target and target.shape == (8,) and target._version == version + 1
    source[2] = 70
    target.evict()
    assert target[2].item() == 70 and target._region is source._region
    plain = torch.arange(4.0)
    target.set_(plain)
    plain[1] = 50
    assert type(plain) is PagedTensor and target.tolist() == [0, 50, 2, 3]
    with pytest.raises(RuntimeError, match="Could not set"):
        target.set_(torch.ones(3, dtype=torch.int64))
    leaf = pager.tensor(torch.ones(3), requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        leaf.set_(source)
    with pytest.raises(UnsupportedOperator, match="set_"):
        target.set_(torch.ones(3).untyped_storage())
    assert target.tolist() == [0, 50, 2, 3]


def test_deep_copy_of_a_parametrized_paged_module_is_apart(pager):
    module = register("symmetric", pager.page_(linear(), min_bytes=0))
    twin, before = copy.deepcopy(module), module.weight.detach().clone()
    train(twin)
    assert same(module.weight, before) and not same(twin.weight, before)
