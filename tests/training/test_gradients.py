# SPDX-License-Identifier: Apache-2.0
"""Gradients of paged parameters: paged, summed over micro-batches, clipped, scaled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pagert.tensor import PagedTensor


@pytest.fixture
def pair(pager):
    """The same module plain and paged."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.LayerNorm(24))
    return plain, pager.page_(copy.deepcopy(plain), min_bytes=0)


def backward(model, seed, **options):
    torch.manual_seed(seed)
    model(torch.randn(6, 24)).square().sum().backward(**options)


def assert_same_gradients(plain, paged):
    for one, other in zip(paged.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert type(one.grad) is PagedTensor and torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_micro_batches_are_summed_in_the_paged_gradient(pair, set_to_none):
    plain, paged = pair
    for step in range(2):
        for micro in range(3):
            for model in pair:
                backward(model, 10 * step + micro)
            assert_same_gradients(plain, paged)
            first = paged[0].weight.grad
            first.evict()
            for parameter in paged.parameters():
                parameter.grad.evict()
        assert paged[0].weight.grad is first
        for model in pair:
            model.zero_grad(set_to_none=set_to_none)
        assert (paged[0].weight.grad is None) == set_to_none


def test_two_losses_and_parameters_without_gradient(pair):
    plain, paged = pair
    for model in pair:
        hidden = model[0](torch.ones(2, 24))
        hidden.sum().backward(retain_graph=True)
        hidden.square().sum().backward()
        assert model[2].weight.grad is None
    assert_same_gradients(plain, paged)


def test_frozen_parameters_get_no_gradient_and_thawed_ones_a_paged_one(pair):
    plain, paged = pair
    for model in pair:
        model[0].requires_grad_(False)
        backward(model, 0)
        assert model[0].weight.grad is None
        model[0].requires_grad_(True)
        backward(model, 1)
    assert_same_gradients(plain, paged)


def test_gradient_of_a_parameter_made_by_hand_is_paged(pager):
    weight = nn.Parameter(pager.tensor(torch.ones(5)))
    late = nn.Parameter(pager.tensor(torch.ones(5)), requires_grad=False)
    late.requires_grad = True
    leaf = pager.tensor(torch.ones(5)).requires_grad_()
    for tensor in (weight, late, leaf):
        tensor.square().sum().backward()
        assert type(tensor.grad) is PagedTensor and tensor.grad.tolist() == [2] * 5
        assert len(tensor._post_accumulate_grad_hooks) == 1


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_gives_the_norm_and_the_gradients_of_the_plain_run(pair, norm_type, foreach):
    norms = []
    extra = [nn.Parameter(torch.ones(3)) for _ in pair]
    for model, plain_parameter in zip(pair, extra, strict=True):
        backward(model, 3)
        plain_parameter.grad = torch.full((3,), 2.0)
        norms.append(
            nn.utils.clip_grad_norm_(
                [*model.parameters(), plain_parameter],
                0.1,
                norm_type,
                error_if_nonfinite=True,
                foreach=foreach,
            )
        )
    assert torch.equal(*norms) and type(norms[1]) is torch.Tensor
    assert_same_gradients(*pair)
    for model in pair:
        nn.utils.clip_grad_value_(model.parameters(), 0.001, foreach=foreach)
    assert_same_gradients(*pair)
    pair[1][0].weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(
            pair[1].parameters(), 0.1, error_if_nonfinite=True, foreach=foreach
        )


def test_scaled_gradients_are_unscaled_and_infinities_skip_the_step(pair):
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(6, 24)).square().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if step == 1:
                with torch.no_grad():
                    model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        model.scale = scaler.get_scale()
    assert pair[0].scale == pair[1].scale
    assert all(
        torch.equal(p, q) for p, q in zip(pair[1].parameters(), pair[0].parameters(), strict=True)
    )


def test_gradients_of_gradients_are_those_of_the_plain_run(pair):
    results = []
    for model in pair:
        torch.manual_seed(0)
        loss = model(torch.randn(6, 24)).square().sum()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in first).backward()
        results.append([g.detach() for g in first])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert_same_gradients(*pair)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_gives_the_plain_gradients(pair, use_reentrant):
    for model in pair:
        x = torch.ones(2, 24, requires_grad=True)
        torch.utils.checkpoint.checkpoint(
            model, x, use_reentrant=use_reentrant
        ).square().sum().backward()
    assert_same_gradients(*pair)


def test_sparse_gradients_stay_sparse_and_can_be_stepped(pager):
    torch.manual_seed(0)
    plain = nn.Embedding(50, 16, sparse=True)
    paged = pager.page_(copy.deepcopy(plain), min_bytes=0)
    for model in (plain, paged):
        model(torch.tensor([1, 3, 3])).square().sum().backward()
        assert model.weight.grad.is_sparse
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(paged.weight, plain.weight)


def test_custom_function_saves_and_gets_paged_tensors(pager):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            assert type(x) is PagedTensor
            return 2 * x * gradient

    weight = pager.tensor(torch.arange(5.0), requires_grad=True)
    result = Square.apply(weight)
    weight.evict()
    result.sum().backward()
    assert weight.grad.tolist() == [0, 2, 4, 6, 8]
