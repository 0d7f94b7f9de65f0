# SPDX-License-Identifier: Apache-2.0
"""Steps in the backward pass: what cannot give the same numbers is refused by name, and leaves things whole."""

from __future__ import annotations

import copy
import io
import sys

import pytest
import torch
from backward_steps import (
    SOME,
    WIDTH,
    adamw,
    build,
    check_loop,
    check_same,
    loss_of,
    simply,
    values,
)
from pagers import REAL
from stepping import open_pager, plain, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from pagert.errors import ConfigurationError, StepError, UnsupportedOperator
from pagert.training.used_gradient import UsedGradient

pytestmark = pytest.mark.skipif(not REAL, reason="the core's extension modules are not built")


@pytest.fixture
def pager():
    with open_pager(device_bytes=SOME) as pager:
        yield pager
        assert pager.pump.check() == 0 and pager.stats().held_bytes == 0


# What is refused.


@pytest.fixture
def trained(pager):
    """A model, its optimizer and its stepping, before the first step."""
    model = build(pager)
    optimizer = adamw(model.parameters())
    return model, optimizer, pager.step_in_backward(optimizer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS.*all gradients"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam.*sparse gradients"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True"),
        (lambda p: Counting(p), "Counting.*independent=True"),
    ],
)
def test_optimizers_that_cannot_are_refused_by_name(pager, make, message):
    with pytest.raises(UnsupportedOperator, match=message):
        pager.step_in_backward(make(build(pager).parameters()))


class Counting(torch.optim.Optimizer):
    """One from elsewhere, which may count its steps in its group."""

    def __init__(self, parameters, counts=False):
        super().__init__(parameters, {"lr": 0.1, "steps": 0})
        self.counts = counts

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += self.counts
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def test_an_independent_optimizer_from_elsewhere_is_bitwise_the_steps_after(pager):
    check_loop(pager, simply, Counting, independent=True)


def test_an_optimizer_that_shares_a_count_is_found_out(pager):
    model = build(pager)
    pager.step_in_backward(Counting(model.parameters(), counts=True), independent=True).remove()
    optimizer = Counting(model.parameters(), counts=True)
    pager.step_in_backward(optimizer, independent=True)
    with pytest.raises(StepError, match=r"group\['steps'\].*each parameter by itself"):
        loss_of(model, 0).backward()


@pytest.mark.parametrize("accumulate", [0, -1, 1.0, True, None])
def test_a_wrong_number_of_passes_is_refused(pager, accumulate):
    with pytest.raises(ConfigurationError, match="accumulate="):
        pager.step_in_backward(adamw(build(pager).parameters()), accumulate=accumulate)


def test_stepping_twice_over_one_parameter_is_refused(pager, trained):
    with pytest.raises(ConfigurationError, match=r"already; call remove\(\)"):
        pager.step_in_backward(torch.optim.SGD(trained[0].parameters(), lr=0.1))


@pytest.mark.parametrize(
    "look",
    [
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
        lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model, optimizer: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.requires_grad]),
        lambda model, optimizer: model.body[0].weight.grad.norm(),
        lambda model, optimizer: model.body[0].weight.grad.clone(),
        lambda model, optimizer: model.body[0].weight.grad.copy_(torch.ones(WIDTH, WIDTH)),
        lambda model, optimizer: model.body[0].weight.add_(model.body[0].weight.grad),
        lambda model, optimizer: model.body[0].weight.grad.tolist(),
        lambda model, optimizer: model.body[0].weight.grad.numpy(),
        lambda model, optimizer: model.body[0].weight.grad.data_ptr(),
        lambda model, optimizer: torch.save(model.body[0].weight.grad, io.BytesIO()),
        lambda model, optimizer: torch.nn.utils.parameters_to_vector([model.body[0].weight.grad]),
    ],
)
@pytest.mark.parametrize("after_the_step", [False, True])
def test_whoever_reads_a_used_gradient_is_refused_by_name(trained, look, after_the_step):
    model, optimizer, _ = trained
    loss_of(model, 0).backward()
    if after_the_step:
        optimizer.step()
    with pytest.raises(UnsupportedOperator, match=r"step_in_backward has used.*clip_grad_norm_"):
        with torch.no_grad():
            look(model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling_is_refused_by_name_and_works_switched_off(pager, fused):
    model = build(pager)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    stepping = pager.step_in_backward(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(UnsupportedOperator, match="GradScaler"):
        scaler.step(optimizer)
    stepping.abandon()


def test_a_backward_pass_without_a_step_before_it_is_refused_by_name(trained):
    model, optimizer, stepping = trained
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    before = values(model, optimizer)
    with pytest.raises(StepError, match=r"call optimizer.step\(\) and zero_grad\(\) after each"):
        loss_of(model, 1).backward()
    check_same(before, values(model, optimizer))
    with pytest.raises(StepError, match=r"abandon\(\)"):
        optimizer.step()
    stepping.abandon()
    simply(model, optimizer, None, steps=1)


def test_a_step_without_zero_grad_before_it_is_refused_by_name(trained):
    model, optimizer, _ = trained
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(StepError, match=r"zero_grad\(\)"):
        loss_of(model, 1).backward()


def test_a_second_step_for_one_gradient_is_refused_by_name(trained):
    model, optimizer, _ = trained
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(StepError, match="without a new gradient"):
        optimizer.step()


def test_settings_that_change_before_the_step_are_refused_by_name(trained):
    model, optimizer, _ = trained
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StepError, match=r"lr of group 0 changed.*before backward"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()


def test_a_gradient_given_after_the_update_is_refused_by_name(trained):
    model, optimizer, _ = trained
    loss_of(model, 0).backward()
    model.body[0].weight.grad = torch.ones(WIDTH, WIDTH)
    with pytest.raises(StepError, match="given another gradient"):
        optimizer.step()


@pytest.mark.parametrize(
    "use", [lambda o: o.state_dict(), lambda o: o.load_state_dict(adamw(build().parameters()).state_dict())]
)
def test_state_within_a_step_is_refused_by_name(trained, use):
    model, optimizer, stepping = trained
    loss_of(model, 0).backward()
    with pytest.raises(StepError, match="state is saved or loaded"):
        use(optimizer)
    with pytest.raises(StepError, match=r"remove\(\) with"):
        stepping.remove()
    optimizer.step()
    use(optimizer)


def test_a_graph_that_is_used_again_after_the_update_is_pytorchs_own_error(trained):
    model, _, _ = trained
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    with pytest.raises((RuntimeError, StepError), match=r"modified by an inplace|each backward pass"):
        loss.backward()


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_saved_behind_autograds_back_is_pytorchs_own_error(pager, fused):
    layer = pager.page_(nn.Linear(64, 64, bias=False), min_bytes=0)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
    pager.step_in_backward(optimizer)
    x = torch.ones(2, 64, requires_grad=True)
    # The first use is of no gradient to the weight, and runs backward after its update.
    out = layer(nn.functional.linear(x, layer.weight.detach()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_parameter_used_within_and_without_a_pass_is_refused_by_name(pager):
    torch.manual_seed(0)
    layer = pager.page_(nn.Linear(64, 64), min_bytes=0)
    optimizer = adamw(layer.parameters())
    pager.step_in_backward(optimizer)
    inner = checkpoint(layer, torch.ones(2, 64, requires_grad=True), use_reentrant=True)
    with pytest.raises(StepError, match="use_reentrant=False"):
        layer(inner).sum().backward()
    with pytest.raises(StepError, match=r"abandon\(\)"):
        optimizer.step()


class Failing(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_half_a_step_is_not_gone_on_with_until_the_user_says_so(trained, error):
    model, optimizer, stepping = trained
    before = {name: plain(one) for name, one in model.named_parameters()}

    def around(part, x):
        return part(x if part is not model.body[0] else Failing.apply(x, error))

    with pytest.raises(type(error)):
        loss_of(model, 0, around=around).backward()
    changed = [name for name, one in model.named_parameters() if not same(one, before[name])]
    assert "sometimes.weight" in changed and "embed.weight" not in changed
    after = values(model, optimizer)
    for go_on in (optimizer.step, lambda: loss_of(model, 1).backward(), optimizer.step):
        with pytest.raises(StepError, match=r"broke off.*abandon\(\)"):
            go_on()
    check_same(after, values(model, optimizer))  # nothing was done on top
    stepping.abandon()
    assert all(one.grad is None for one in model.parameters())
    simply(model, optimizer, None, steps=2)


def test_a_pass_that_fails_before_any_update_may_be_repeated(pager):
    def loop(model, optimizer, stepping):
        with pytest.raises(ValueError):
            Failing.apply(loss_of(model, 0), ValueError("no")).backward()
        return simply(model, optimizer, stepping)

    check_loop(pager, loop)


def test_a_step_that_fails_is_not_gone_on_with(trained, monkeypatch):
    model, optimizer, stepping = trained
    loss_of(model, 0).backward()

    def fail(*arguments, **options):
        raise ValueError("no")

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["torch.optim.adam"], "adam", fail)
        with pytest.raises(ValueError):
            optimizer.step()
    with pytest.raises(StepError, match=r"broke off.*abandon\(\)"):
        optimizer.step()
    stepping.abandon()
    simply(model, optimizer, None, steps=1)


def test_a_used_gradient_says_what_it_is(trained):
    model, _, _ = trained
    loss_of(model, 0).backward()
    gradient = model.body[0].weight.grad
    assert (gradient.shape, gradient.dtype) == ((WIDTH, WIDTH), torch.float32)
    assert "UsedGradient" in repr(gradient) and type(copy.deepcopy(gradient)) is UsedGradient
