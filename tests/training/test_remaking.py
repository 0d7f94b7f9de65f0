# SPDX-License-Identifier: Apache-2.0
"""Parameters made after the model of another one, what is asked of their gradients, and their layouts."""

from __future__ import annotations

import itertools

import pytest
import torch
from stepping import same
from torch import nn

from pagert.tensor import PagedTensor

pytestmark = pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)


@pytest.fixture
def weight(pager):
    weight = pager.page_(nn.Linear(40, 40), min_bytes=0).weight
    weight.note = "kept"
    weight.sum()  # it has a footprint now
    return weight


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameter_remade_of_paged_data_looks_at_its_bytes(pager, weight, requires_grad):
    data = pager.tensor(torch.arange(8.0))
    made = type(weight)(data, requires_grad=requires_grad)
    assert isinstance(made, nn.Parameter) and type(made) is PagedTensor
    assert made.requires_grad is requires_grad and made._region is data._region
    data[3] = 30
    assert made[3].item() == 30
    if requires_grad:
        (made * 2).sum().backward()
        assert type(made.grad) is PagedTensor


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameter_remade_of_plain_data_without_a_pager_is_plain(weight, requires_grad):
    data = torch.arange(8.0)
    made = type(weight)(data, requires_grad=requires_grad)
    assert type(made) is nn.Parameter and made.requires_grad is requires_grad
    assert made.data_ptr() == data.data_ptr()
    assert type(type(weight)(data)) is torch.Tensor


@pytest.mark.parametrize("given", [{}, {"requires_grad": False}])
def test_attributes_of_another_parameter_name_its_pager_and_never_its_bytes(pager, weight, given):
    before = weight.detach().clone()
    for data in (torch.arange(8.0), pager.tensor(torch.arange(8.0))):
        made = type(weight)(data, **given, **weight.__dict__)
        assert type(made) is PagedTensor and isinstance(made, nn.Parameter)
        assert made.note == "kept" and made.requires_grad is not bool(given)
        assert made._region is not weight._region and made._runtime is pager
        made.evict()
        assert made.tolist() == list(range(8)) and made.sum().item() == 28
        with torch.no_grad():
            made.zero_()
        assert same(weight, before) and data.sum().item() == 0


def test_library_that_remakes_every_parameter_trains_as_on_plain_ones(pager):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    paged = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    paged.load_state_dict(plain.state_dict())
    pager.page_(paged, min_bytes=0)
    for module in paged.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            value = p.detach().to(torch.float64)
            setattr(module, name, type(p)(value, requires_grad=p.requires_grad))
    plain.double()
    for module in (plain, paged):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(2):
            module(torch.ones(2, 40, dtype=torch.float64)).sum().backward()
            optimizer.step()
    assert all(same(*pair) for pair in zip(plain.parameters(), paged.parameters(), strict=True))
    assert all(type(p) is PagedTensor for p in paged.parameters())


def test_a_paged_tensor_of_no_tensor_is_refused_by_name(weight):
    for arguments in ((), (3, 4), ([1.0],)):
        with pytest.raises(TypeError, match=r"PagedTensor\(.*pager.tensor|positional"):
            type(weight)(*arguments)


def test_dtype_asked_for_gradients_stays_when_paged_and_unpaged(pager):
    modules = [nn.Linear(40, 40, dtype=torch.bfloat16) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    for module in modules:
        module.weight.grad_dtype = torch.float32
        module.bias.grad_dtype = None
    for change in (lambda: pager.page_(modules[1], min_bytes=0), lambda: pager.unpage_(modules[1])):
        change()
        for module in modules:
            module(torch.ones(2, 40, dtype=torch.bfloat16)).sum().backward()
        for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            assert one.grad_dtype == other.grad_dtype and one.grad.dtype == other.grad.dtype
            assert same(one.grad, other.grad)


LIKE = {
    "zeros_like": torch.zeros_like,
    "preserve": lambda t: torch.zeros_like(t, memory_format=torch.preserve_format),
    "contiguous": lambda t: torch.empty_like(t, memory_format=torch.contiguous_format),
    "ones_like": torch.ones_like,
    "rand_like": torch.rand_like,
    "clone": torch.clone,
    "double": lambda t: t.double(),
    "new_zeros": lambda t: t.new_zeros(t.shape),
}
CUTS = {
    "whole": lambda t: t,
    "sliced": lambda t: t[:, ::2],
    "one": lambda t: t[:, :1],
    "expanded": lambda t: t[:1].expand(3, *t.shape[1:]),
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("dimensions", [2, 3, 4, 5])
def test_tensors_after_any_permuted_model_have_the_strides_of_plain_ones(pager, dimensions):
    base = torch.randn(*range(2, 2 + dimensions))
    paged = pager.tensor(base)
    for order in itertools.permutations(range(dimensions)):
        for cut_name, cut in CUTS.items():
            one, other = cut(base.permute(order)), cut(paged.permute(order))
            assert one.stride() == other.stride()
            for name, like in LIKE.items():
                assert like(one).stride() == like(other).stride(), (order, cut_name, name)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizer_state_of_permuted_parameters_has_the_strides_of_plain_ones(pager, optimizer):
    def module():
        torch.manual_seed(0)
        base = torch.randn(4, 5, 6, 7)
        made = nn.Module()
        for index, order in enumerate(itertools.permutations(range(4))):
            setattr(made, f"p{index}", nn.Parameter(base.clone().permute(order)))
        made.cut = nn.Parameter(base.clone()[:, ::2])
        made.three = nn.Parameter(torch.randn(6, 7, 8).transpose(0, 2))
        return made

    modules = [module(), pager.page_(module(), min_bytes=0)]
    states = []
    for m in modules:
        made = optimizer(m.parameters(), lr=0.1)
        sum(p.square().sum() for p in m.parameters()).backward()
        made.step()
        states.append([made.state[p] for p in m.parameters()])
    for one, other in zip(*states, strict=True):
        for name in one:
            assert one[name].stride() == other[name].stride() and same(one[name], other[name]), name
    assert all(same(*pair) for pair in zip(*[m.parameters() for m in modules], strict=True))
