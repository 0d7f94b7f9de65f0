# SPDX-License-Identifier: Apache-2.0
"""Paging a module in place and back: objects, ties, hooks, gradients and small tensors."""

from __future__ import annotations

import copy
import logging
import weakref

import pytest
import torch
from torch import nn

from pagert.errors import ForeignTensor, PagertError, UnsupportedTensor
from pagert.tensor import PagedTensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.inner = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.randn(40, 32))

    def forward(self, x):
        return self.head(self.norm(self.inner(self.embedding(x))) * self.scale + self.table[0])


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def tensors(module):
    return dict(
        [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    )


def test_objects_ties_and_values_stay(pager, net):
    plain, before = copy.deepcopy(net), dict(tensors(net))
    references = {name: weakref.ref(tensor) for name, tensor in before.items()}
    assert pager.page_(net, min_bytes=0) is net
    after = tensors(net)
    for name, tensor in after.items():
        assert tensor is before[name] and references[name]() is tensor
        assert type(tensor) is PagedTensor
        assert isinstance(tensor, nn.Parameter) == (name not in dict(net.named_buffers()))
        assert torch.equal(tensor, tensors(plain)[name])
    assert net.head.weight is net.embedding.weight
    pager.unpage_(net)
    for name, tensor in tensors(net).items():
        assert tensor is before[name] and type(tensor) in (nn.Parameter, torch.Tensor)
        assert torch.equal(tensor, tensors(plain)[name])
    assert type(net.inner.weight) is nn.Parameter and net.inner.weight.requires_grad
    if hasattr(pager.pump, "live_regions"):
        assert pager.pump.live_regions == 0


def test_small_tensors_stay_plain_and_their_sum_is_reported(pager, net, caplog):
    with caplog.at_level(logging.INFO, logger="pagert"):
        pager.page_(net)
    small = {name for name, tensor in tensors(net).items() if type(tensor) is not PagedTensor}
    assert small == {
        "inner.bias",
        "norm.weight",
        "norm.bias",
        "scale",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    expected = sum(tensors(net)[name].nbytes for name in small)
    assert pager.plain_bytes == expected
    assert "stay unpaged" in caplog.text


def test_paging_twice_changes_nothing(pager, net):
    pager.page_(net, min_bytes=0)
    regions = {name: tensor._region for name, tensor in tensors(net).items()}
    pager.page_(net, min_bytes=0)
    assert all(tensor._region is regions[name] for name, tensor in tensors(net).items())
    hooks = net.inner.weight._post_accumulate_grad_hooks
    assert len(hooks) == 1


def test_distinct_parameters_that_share_a_storage_stay_tied(pager):
    module = nn.Module()
    flat = torch.randn(2000)
    module.one = nn.Parameter(flat[:1500].view(30, 50))
    module.two = nn.Parameter(flat[500:].view(50, 30))
    module.apart = nn.Parameter(torch.randn(100))
    slab = torch.randn(300)
    module.left, module.right = nn.Parameter(slab[:100]), nn.Parameter(slab[200:])
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    del slab
    pager.page_(module, min_bytes=0)
    assert type(flat) is PagedTensor and flat._region is module.one._region
    assert module.one._region is module.two._region
    assert module.left._region is not module.right._region  # neighbours in a slab are not tied
    assert all(torch.equal(p, values[name]) for name, p in module.named_parameters())
    with torch.no_grad():
        module.one.view(-1)[700] = 99
    assert module.two.view(-1)[200].item() == 99
    twin = copy.deepcopy(module)
    assert twin.one._region is twin.two._region and twin.one._region is not module.one._region
    pager.unpage_(module)
    with torch.no_grad():
        module.one.view(-1)[600] = 77
    assert module.two.view(-1)[100].item() == 77
    assert torch.equal(module.right, values["right"])


def test_untying_gives_independent_pages(pager, net):
    pager.page_(net, min_bytes=0)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    with torch.no_grad():
        net.head.weight.zero_()
    assert net.embedding.weight.abs().sum().item() > 0 and type(net.head.weight) is PagedTensor


def test_hooks_attributes_and_existing_gradients_survive_both_ways(pager):
    module = nn.Linear(40, 40)
    module(torch.randn(3, 40)).sum().backward()
    weight, gradient = module.weight, module.weight.grad
    before, seen = gradient.clone(), []
    weight.note = "kept"
    handle = weight.register_hook(lambda g: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad).__name__))
    pager.page_(module, min_bytes=0)
    assert weight.note == "kept" and weight.grad is gradient and type(gradient) is PagedTensor
    assert torch.equal(gradient, before)
    module(torch.randn(3, 40)).sum().backward()
    assert seen[0] == "hook" and len(seen) == 2
    handle.remove()
    pager.unpage_(module)
    assert weight.note == "kept" and weight.grad is gradient and type(gradient) is torch.Tensor
    module.zero_grad()
    module(torch.randn(3, 40)).sum().backward()
    assert len(seen) == 3 and type(weight.grad) is torch.Tensor


def test_module_in_a_live_graph_is_refused_whole_and_works_on(pager):
    module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    loss = module(torch.randn(3, 40)).square().sum()
    with pytest.raises(PagertError, match=r"1.weight \(40, 40\) float32.*alive"):
        pager.page_(module, min_bytes=0)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    loss.backward()
    del loss
    pager.page_(module, min_bytes=0)
    assert type(module[0].weight) is PagedTensor and type(module[0].weight.grad) is PagedTensor


def test_view_of_a_tensor_to_page_stays_one(pager):
    module = nn.BatchNorm1d(40)
    view = module.running_mean[1:]
    pager.page_(module, min_bytes=0)
    version = module.running_mean._version
    view[2] = 7
    assert type(view) is PagedTensor and module.running_mean[3].item() == 7
    assert view._base is module.running_mean and module.running_mean._version == version + 1


def test_view_in_a_graph_of_a_tensor_to_page_is_refused(pager):
    module = nn.Linear(40, 40)
    view = module.weight[1:]
    with pytest.raises(PagertError, match=r"weight.*graph.*still alive"):
        pager.page_(module, min_bytes=0)
    assert type(module.bias) is nn.Parameter
    del view
    pager.page_(module, min_bytes=0)


def test_backward_through_a_graph_from_before_paging_says_so(pager):
    module = nn.Linear(40, 40)
    old = module(torch.randn(3, 40)).sum()
    pager.page_(module, min_bytes=0)
    with pytest.raises(PagertError, match=r"(weight|bias).*from before"):
        old.backward()
    module(torch.randn(3, 40)).sum().backward()
    stale = module(torch.randn(3, 40)).sum()
    pager.unpage_(module)
    with pytest.raises(PagertError, match="from before"):
        stale.backward()
    assert type(module.weight.grad) is torch.Tensor


def test_unsupported_tensor_in_a_module_is_named_before_anything_changes(pager):
    module = nn.Sequential(nn.Linear(40, 40), nn.Module())
    module[1].register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedTensor, match=r"1\.sparse"):
        pager.page_(module, min_bytes=0)
    assert type(module[0].weight) is nn.Parameter


def test_module_of_another_pager_is_refused(make_pager):
    one, other = make_pager(), make_pager()
    module = one.page_(nn.Linear(40, 40), min_bytes=0)
    with pytest.raises(ForeignTensor, match=r"weight \(40, 40\)"):
        other.page_(module, min_bytes=0)
    other.unpage_(module)
    assert type(module.weight) is PagedTensor
    one.unpage_(module)
    assert type(other.page_(module, min_bytes=0).weight) is PagedTensor


def test_meta_parameters_are_left_alone_and_can_be_replaced_by_paged_ones(pager):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    values = torch.randn(40, 40)
    module[0].weight = nn.Parameter(pager.tensor(values))
    assert type(module[0].weight) is PagedTensor and isinstance(module[0].weight, nn.Parameter)
    pager.page_(module, min_bytes=0)
    assert module[1].weight.is_meta and module[0].bias.is_meta
    (module[0].weight * 2).sum().backward()
    assert type(module[0].weight.grad) is PagedTensor


def test_parameter_larger_than_the_device_is_paged_and_read_by_rows(make_pager):
    pager = make_pager(device_bytes=16 * 4096)
    module = nn.Embedding(5000, 8)
    values = module.weight.detach().clone()
    pager.page_(module)
    assert module.weight[17:19].tolist() == values[17:19].tolist()
    pager.unpage_(module)
    assert torch.equal(module.weight, values)


def test_weights_read_outside_of_forward_are_right(pager, net):
    plain = copy.deepcopy(net)
    pager.page_(net, min_bytes=0)
    for model in (plain, net):
        model.result = [
            nn.functional.linear(torch.ones(2, 32), model.inner.weight, model.inner.bias),
            model.inner.weight.norm(),
            sum(p.square().sum() for p in model.parameters()),
            torch.cat([p.flatten() for p in model.parameters()]),
            nn.utils.parameters_to_vector(model.parameters()),
            torch.func.functional_call(
                model.inner, dict(model.inner.named_parameters()), (torch.ones(1, 32),)
            ),
            torch.vmap(lambda row, m=model: m.inner.weight @ row)(torch.eye(32)),
        ]
    assert all(torch.equal(one, other) for one, other in zip(net.result, plain.result, strict=True))
    assert all(p.device.type == "cpu" for p in net.parameters())


def test_batch_norm_updates_its_paged_statistics(pager, net):
    plain = copy.deepcopy(net)
    pager.page_(net, min_bytes=0)
    x = torch.arange(20)
    for _ in range(3):
        assert torch.equal(net(x), plain(x))
    assert torch.equal(net.norm.running_var, plain.norm.running_var)
    assert torch.equal(net.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_train_as_plain_ones(pager, kind):
    torch.manual_seed(0)
    plain = kind(16, 24, num_layers=2, bidirectional=True)
    paged = pager.page_(copy.deepcopy(plain), min_bytes=0)
    x = torch.randn(5, 3, 16)
    for model in (plain, paged):
        model(x)[0].square().sum().backward()
    for one, other in zip(paged.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad) and type(one.grad) is PagedTensor


def test_modules_and_gradients_are_freed_by_reference_counts_alone(pager):
    import gc

    if not hasattr(pager.pump, "live_regions"):
        pytest.skip("counts the regions of the fake runtime")
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            module = pager.page_(nn.Linear(40, 40), min_bytes=0)
            module(torch.ones(1, 40)).sum().backward()
            pager.unpage_(module)
            pager.page_(module, min_bytes=0)
            del module
            assert pager.pump.live_regions == 0
    finally:
        gc.enable()
