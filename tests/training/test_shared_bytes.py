# SPDX-License-Identifier: Apache-2.0
"""Buffers and their views, flat gradients, slabs of parameters: the link between them outlives paging."""

from __future__ import annotations

import copy

import pytest
import torch
from stepping import same
from torch import nn

from pagert.errors import PagertError
from pagert.tensor import PagedTensor

pytestmark = pytest.mark.parametrize("make_pager", ["fake", "host-flash"], indirect=True)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))


def flatten_gradients(module):
    """One buffer of all gradients, as gradient clipping and communication libraries make it."""
    flat = torch.zeros(sum(p.numel() for p in module.parameters()))
    offset = 0
    for p in module.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    return flat


def flatten_parameters(module):
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat, module.parameters())
    return flat


def backward(module):
    module(torch.ones(2, 40)).square().sum().backward()


@pytest.mark.parametrize("min_bytes", [0, 1024])
def test_flat_gradients_and_their_buffer_stay_one(pager, min_bytes):
    models, flats = [model(), model()], []
    for m in models:
        flats.append(flatten_gradients(m))
    pager.page_(models[1], min_bytes=min_bytes)
    for m, flat in zip(models, flats, strict=True):
        backward(m)
        flat.mul_(0.5)
        backward(m)
    assert type(flats[1]) is PagedTensor and same(*flats)
    for one, other in zip(*[m.parameters() for m in models], strict=True):
        assert same(one.grad, other.grad)
    for m, flat in zip(models, flats, strict=True):
        torch.optim.AdamW(m.parameters(), lr=0.1).step()
        flat.zero_()
        assert all(p.grad.abs().sum().item() == 0 for p in m.parameters())
    assert all(same(*pair) for pair in zip(*[m.parameters() for m in models], strict=True))


def test_flat_gradients_and_their_buffer_stay_one_when_unpaged(pager):
    module = pager.page_(model(), min_bytes=0)
    flat = pager.zeros(sum(p.numel() for p in module.parameters()))
    offset = 0
    for p in module.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    backward(module)
    pager.unpage_(module)
    assert type(flat) is torch.Tensor
    before = flat.clone()
    backward(module)
    assert same(flat, before * 2) and type(module[0].weight.grad) is torch.Tensor


def test_flat_gradients_given_to_a_paged_module_stay_one_with_their_buffer(pager):
    models = [model(), pager.page_(model(), min_bytes=0)]
    flats = [flatten_gradients(m) for m in models]
    for m, flat in zip(models, flats, strict=True):
        backward(m)
        flat.mul_(0.5)
        backward(m)
    assert type(flats[1]) is PagedTensor and same(*flats)
    for one, other in zip(*[m.parameters() for m in models], strict=True):
        assert same(one.grad, other.grad)


def test_gradient_given_to_a_paged_parameter_is_the_one_that_is_accumulated(pager):
    module = pager.page_(model(), min_bytes=0)
    gradient = module[0].weight.grad = torch.zeros(40, 40)
    backward(module)
    backward(module)
    assert module[0].weight.grad is gradient and type(gradient) is PagedTensor
    assert gradient.abs().sum().item() > 0
    with pytest.raises(RuntimeError, match=r"size|shape"):
        module[0].weight.grad = torch.zeros(3)
    del module[0].weight.grad
    assert module[0].weight.grad is None


def test_slab_of_parameters_and_its_buffer_stay_one(pager):
    models = [model(), model()]
    flats = [flatten_parameters(m) for m in models]
    pager.page_(models[1], min_bytes=0)
    for m, flat in zip(models, flats, strict=True):
        with torch.no_grad():
            flat[100:2000] *= 3
        backward(m)
        torch.optim.SGD(m.parameters(), lr=0.01).step()
    assert same(*flats) and type(flats[1]) is PagedTensor
    assert all(same(*pair) for pair in zip(*[m.parameters() for m in models], strict=True))
    pager.unpage_(models[1])
    flats[1].zero_()
    assert type(flats[1]) is torch.Tensor
    assert all(p.abs().sum().item() == 0 for p in models[1].parameters())


@pytest.mark.parametrize("paged_vector", [False, True])
def test_vector_to_parameters_of_a_paged_module_links_them_as_in_a_plain_one(pager, paged_vector):
    module = pager.page_(model(), min_bytes=0)
    vector = nn.utils.parameters_to_vector(module.parameters()).detach() + 1
    expected = vector.clone()
    if paged_vector:
        vector = pager.tensor(vector)
    nn.utils.vector_to_parameters(vector, module.parameters())
    assert same(nn.utils.parameters_to_vector(module.parameters()), expected)
    vector.mul_(2)
    assert same(nn.utils.parameters_to_vector(module.parameters()), expected * 2)
    assert all(type(p) is PagedTensor for p in module.parameters())


def test_state_dict_taken_before_paging_follows_the_module(pager):
    module = model()
    state = module.state_dict()
    pager.page_(module, min_bytes=0)
    with torch.no_grad():
        module[0].weight.fill_(7)
    assert state["0.weight"].unique().tolist() == [7]


def test_disjoint_views_of_a_slab_that_nobody_holds_are_paged_apart(pager):
    module = nn.Module()
    slab = torch.arange(3000.0)
    module.left, module.right = nn.Parameter(slab[:1000]), nn.Parameter(slab[1000:])
    expected = slab.clone()
    del slab
    pager.page_(module, min_bytes=0)
    assert module.left._region is not module.right._region
    assert same(torch.cat([module.left, module.right]), expected)


def test_slab_that_is_a_buffer_of_the_module_stays_linked_to_its_parts(pager):
    module = nn.Module()
    module.register_buffer("slab", torch.arange(3000.0))
    module.left = nn.Parameter(module.slab[:1000])
    module.register_buffer("right", module.slab[1000:])
    for m in (module, copy.deepcopy(pager.page_(module, min_bytes=0))):
        with torch.no_grad():
            m.slab.add_(1)
        assert m.left[5].item() == 6 and m.right[5].item() == 1006
    assert module.right._base is module.slab


def test_bytes_that_a_graph_or_a_storage_object_holds_are_refused_whole(pager):
    module = model()
    storage = module[1].weight.untyped_storage()
    alias = torch.empty(0).set_(storage)
    kept = alias.numpy()  # holds the tensor object, which is found
    pager.page_(module, min_bytes=0)
    del kept
    module = nn.BatchNorm1d(40)
    other = (module.running_mean.detach().view(40) * nn.Parameter(torch.ones(40))).sum()
    with pytest.raises(PagertError, match=r"running_mean.*still alive"):
        pager.page_(module, min_bytes=0)
    assert all(type(t) is not PagedTensor for t in module.state_dict().values())
    del other
    pager.page_(module, min_bytes=0)


def test_version_of_a_buffer_counts_writes_through_its_views(pager):
    module = nn.Module()
    module.register_buffer("table", torch.ones(2000))
    view = module.table[5:]
    pager.page_(module, min_bytes=0)
    weight = nn.Parameter(torch.ones(2000))
    loss = (weight * module.table).sum()
    view.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_assigned_data_and_its_source_are_one(pager):
    weight, source = pager.tensor(torch.ones(2000)), torch.zeros(2000)
    alias = source[10:]
    weight.data = source
    alias.fill_(3)
    assert weight.sum().item() == 1990 * 3 and type(source) is type(alias) is PagedTensor


def test_non_dense_parameter_keeps_its_strides_and_bytes(pager):
    for make in (lambda t: t[:, ::2], lambda t: t[:1].expand(3, 40), lambda t: t.t()[:, 1:2]):
        module = nn.Module()
        module.weight = nn.Parameter(make(torch.randn(40, 40)))
        stride, expected = module.weight.stride(), module.weight.detach().clone()
        pager.page_(module, min_bytes=0)
        assert module.weight.stride() == stride and same(module.weight, expected)
