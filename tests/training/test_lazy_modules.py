# SPDX-License-Identifier: Apache-2.0
"""Lazy modules become paged in their first forward pass, and train as plain ones."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from stepping import same
from torch import nn

from pagert.tensor import PagedTensor

pytestmark = [
    pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
]

KINDS = {
    "linear": (lambda: nn.LazyLinear(40), (3, 40)),
    "conv": (lambda: nn.LazyConv2d(40, 3), (2, 5, 8, 8)),
    "transposed conv": (lambda: nn.LazyConvTranspose1d(40, 3), (2, 5, 8)),
    "batch norm": (lambda: nn.LazyBatchNorm1d(), (4, 40)),
    "instance norm": (lambda: nn.LazyInstanceNorm2d(affine=True, track_running_stats=True), (2, 40, 4, 4)),
    "within": (lambda: nn.Sequential(nn.Linear(40, 40), nn.LazyLinear(40), nn.LazyBatchNorm1d()), (3, 40)),
}


def make(name):
    torch.manual_seed(0)
    return KINDS[name][0]()


def train(module, shape, optimizer=None):
    torch.manual_seed(1)
    for _ in range(2):
        loss = module(torch.randn(shape)).square().mean()
        optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def state_is_same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", KINDS)
def test_lazy_module_is_paged_when_it_becomes_concrete_and_trains_as_a_plain_one(pager, name):
    plain, paged = make(name), pager.page_(make(name), min_bytes=0)
    before = dict(paged.named_parameters())
    for module in (plain, paged):
        train(module, KINDS[name][1])
    assert state_is_same(plain, paged)
    assert type(paged) is type(plain)
    for key, tensor in [*paged.named_parameters(), *paged.named_buffers()]:
        assert type(tensor) is PagedTensor, key
        assert key not in before or before[key] is tensor
    assert not any(m._forward_pre_hooks for m in paged.modules())
    pager.unpage_(paged)
    assert state_is_same(plain, paged)


def test_optimizer_built_before_the_shapes_are_known_steps_the_paged_parameters(pager):
    modules = [make("linear"), pager.page_(make("linear"), min_bytes=0)]
    for module in modules:
        train(module, (3, 40), torch.optim.SGD(module.parameters(), lr=0.1))
    assert state_is_same(*modules) and type(modules[1].weight) is PagedTensor


def test_lazy_module_that_is_loaded_is_paged_at_its_first_forward_pass(pager):
    source = nn.Linear(40, 40)
    module = pager.page_(make("linear"), min_bytes=0)
    module.load_state_dict(source.state_dict())
    assert same(module(torch.ones(2, 40)), source(torch.ones(2, 40)))
    assert type(module.weight) is PagedTensor


def test_lazy_module_that_was_unpaged_or_whose_pager_was_closed_stays_plain(make_pager):
    pager, closed = make_pager(), make_pager()
    module = pager.unpage_(pager.page_(make("linear"), min_bytes=0))
    other = closed.page_(make("linear"), min_bytes=0)
    closed.close()
    for one in (module, other):
        one(torch.ones(2, 40))
        assert type(one.weight) is nn.Parameter


def test_copies_of_a_lazy_module_are_paged_and_files_of_it_plain(pager):
    module = pager.page_(make("linear"), min_bytes=0)
    twin = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for one, kind in ((module, PagedTensor), (twin, PagedTensor), (loaded, nn.Parameter)):
        one(torch.ones(2, 40))
        assert type(one.weight) is kind
