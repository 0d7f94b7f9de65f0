# SPDX-License-Identifier: Apache-2.0
"""Forward-mode differentiation and the transforms of torch.func: bitwise those of plain tensors."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from stepping import same
from torch import func

MLP = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))


def f(x):
    """Uses views, strides, in-place changes and reductions."""
    y = (x @ x.t()).tanh() + x[1:3].sum(0) * x.diagonal()
    y = y.clone()
    y[2:].mul_(2)
    return (y.view(-1)[::3] * x.t().reshape(-1)[::3]).sum()


def model(x):
    return func.functional_call(MLP, dict(MLP.named_parameters()), (x,)).square().sum()


def dual(function, x, tangent):
    with forward_ad.dual_level():
        result = function(forward_ad.make_dual(x, tangent))
        return tuple(forward_ad.unpack_dual(result))


def hvp(function, x, tangent):
    """Forward over reverse."""
    return func.jvp(func.grad(function), (x,), (tangent,))


TRANSFORMS = {
    "dual level": dual,
    "dual level, column major": lambda f, x, t: dual(f, x.t(), t.t()),
    "dual level, part": lambda f, x, t: dual(lambda x: x.tanh().sum(), x[3:9, 1:], t[3:9, 1:]),
    "jvp": lambda f, x, t: func.jvp(f, (x,), (t,)),
    "hvp": hvp,
    "hvp, reverse over forward": lambda f, x, t: func.grad(lambda x: func.jvp(f, (x,), (t,))[1])(x),
    "grad": lambda f, x, t: func.grad(f)(x),
    "vjp": lambda f, x, t: func.vjp(lambda x: x.t() @ x, x)[1](t)[0],
    "jacrev": lambda f, x, t: func.jacrev(lambda x: x.t().tanh()[:3])(x),
    "jacfwd": lambda f, x, t: func.jacfwd(lambda x: x.t().tanh()[:3])(x),
    "hessian": lambda f, x, t: func.hessian(lambda x: f(torch.cat([x, t[2:]])))(x[:2]),
    "vmap": lambda f, x, t: func.vmap(lambda x, t: (x * t).cumsum(0) @ x)(x, t),
    "vmap over columns": lambda f, x, t: func.vmap(lambda x: x.outer(x), in_dims=1)(x),
    "per-sample gradients": lambda f, x, t: func.vmap(func.grad(lambda x, t: (x * t).tanh().sum()))(
        x, t
    ),
    "autograd.functional.jvp": lambda f, x, t: torch.autograd.functional.jvp(f, x, t),
    "autograd.functional.hvp": lambda f, x, t: torch.autograd.functional.hvp(f, x, t),
    "autograd.functional.jacobian": lambda f, x, t: torch.autograd.functional.jacobian(
        lambda x: x.sin()[:2], x, strategy="forward-mode", vectorize=True
    ),
}


def flat(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [one for result in results for one in flat(result)]


@pytest.mark.parametrize("function", [f, model], ids=["views", "model"])
@pytest.mark.parametrize("tangents", ["plain", "paged", "both"])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_transform_of_paged_tensors_is_that_of_plain_ones(pager, name, tangents, function):
    torch.manual_seed(0)
    x, t = torch.randn(16, 16), torch.randn(16, 16)
    expected = flat(TRANSFORMS[name](function, x, t))
    paged = [x if tangents == "paged" else pager.tensor(x), t if tangents == "plain" else pager.tensor(t)]
    for one in paged:
        if hasattr(one, "evict"):
            one.evict()
    found = flat(TRANSFORMS[name](function, *paged))
    assert len(found) == len(expected)
    assert all(same(one, other) for one, other in zip(expected, found))


@pytest.mark.parametrize("tangents", ["plain", "paged"])
def test_a_directional_derivative_of_a_paged_module_is_that_of_a_plain_one(pager, tangents):
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(24, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 24)
        )
        x = torch.randn(5, 24)
        if paged:
            pager.page_(module, min_bytes=0)
        parameters = dict(module.named_parameters())
        directions = {name: torch.randn(value.shape) for name, value in parameters.items()}
        if paged and tangents == "paged":
            directions = {name: pager.tensor(value) for name, value in directions.items()}

        def loss(parameters, module=module, x=x):
            return func.functional_call(module, parameters, (x,)).square().sum()

        results.append(
            [
                *func.jvp(loss, (parameters,), (directions,)),
                *func.jvp(func.grad(loss), (parameters,), (directions,))[1].values(),
            ]
        )
    assert all(same(one, other) for one, other in zip(*results))


def test_a_dual_tensor_may_be_changed_in_place(pager):
    results = []
    for make in (torch.clone, pager.tensor):
        torch.manual_seed(0)
        x, t, other = make(torch.randn(24, 24)), make(torch.randn(24, 24)), make(torch.randn(24, 24))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, t)
            dual[3:5].mul_(dual[5:7])
            dual.t().add_(forward_ad.make_dual(other, t))
            results.append(forward_ad.unpack_dual(dual))
    assert all(same(one, other) for one, other in zip(*results))


def test_forward_mode_of_paged_tensors_passes_gradcheck(pager):
    x = pager.tensor(torch.randn(4, 4, dtype=torch.float64), requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: (x @ x.t())[1:].tanh(), x, check_forward_ad=True, check_batched_grad=True
    )


def test_plain_operators_on_the_size_of_storages_see_the_tensors_own(pager):
    x, small = pager.zeros(24, 24), pager.zeros(3)
    assert torch.ops.aten._has_same_storage_numel(x, torch.zeros(24, 24))
    assert not torch.ops.aten._has_same_storage_numel(x, small)
    made = torch.ops.aten._new_zeros_with_same_feature_meta(torch.ones(24), x[2:])
    assert made.shape == (22, 24) and made.untyped_storage().nbytes() == x.nbytes
