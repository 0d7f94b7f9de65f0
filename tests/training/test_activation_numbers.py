# SPDX-License-Identifier: Apache-2.0
"""With what autograd saves in pages, numbers are those of plain PyTorch: beside other hooks, modes and threads too."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from activating import MODELS, attention, bits, gradients, held, leaf, nodes_of, real_pager
from pagers import MIB
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

from pagert.tensor import PagedTensor


@pytest.fixture
def pager():
    yield from real_pager()


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("paged", [False, True], ids=["plain", "paged"])
def test_gradients_are_bitwise_those_of_plain_torch(make_pager, make, paged):
    torch.manual_seed(0)
    model, inputs = make()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = [bits(value) for value in gradients(model, inputs, contextlib.nullcontext())]
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    pager = make_pager(device_bytes=MIB // 2)
    if paged:
        model.zero_grad()
        pager.page_(model, min_bytes=1024)
    context = pager.activations(min_bytes=1024)
    assert [bits(value) for value in gradients(model, inputs, context)] == expected
    assert context.stored_bytes > 8000
    assert held(pager) == 0


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_what_flows_between_nodes_is_plain(pager, make):
    torch.manual_seed(0)
    model, inputs = make()
    kinds = set()

    def backward(loss):
        for node in nodes_of(loss):
            node.register_prehook(lambda gradients: kinds.update(map(type, gradients)))
        loss.backward()

    gradients(model, inputs, pager.activations(min_bytes=1024), backward)
    assert torch.Tensor in kinds
    assert PagedTensor not in kinds


STEPS = [
    lambda one, other: one * other,
    lambda one, other: one.tanh(),
    lambda one, other: one @ other.T / 24,
    lambda one, other: torch.sigmoid(one) + other,
    lambda one, other: one[:, ::2].repeat(1, 2) * other,
    lambda one, other: one[:1].expand(24, 24) * other,
    lambda one, other: torch.cat([one[:12], other[12:]]).exp().clamp(max=3),
    lambda one, other: (one * 1.25).sin_().mul_(other),
    lambda one, other: torch.where(one > 0, one, other * 2),
    lambda one, other: nn.functional.dropout(one, 0.3) * one.detach(),
    lambda one, other: one.softmax(-1) * other.view(-1).view(24, 24),
    lambda one, other: one.t().contiguous().relu_() + one.cumsum(0) / 24,
]


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_have_the_gradients_of_plain_torch(make_pager, seed):
    """Chains of operators, views, in-place changes and repeated uses, the same with and without pages."""

    print("seed", seed)

    def run(context):
        draw = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        inputs = [leaf(24, 24), leaf(24, 24), torch.randn(24, 24)]
        values = [value * 1.5 for value in inputs]
        choose = lambda count: int(torch.randint(count, (), generator=draw))  # noqa: E731
        with context:
            for _ in range(30):
                one, other = values[choose(len(values))], values[choose(len(values))]
                step = STEPS[choose(len(STEPS))]
                values.append(step(one, other).clamp(-4, 4))
            loss = sum(value.sum() for value in values[-6:])
        loss.backward()
        return [bits(loss), *(bits(value.grad) for value in inputs if value.grad is not None)]

    pager = make_pager(device_bytes=MIB // 4)
    context = pager.activations(min_bytes=512)
    assert run(context) == run(contextlib.nullcontext())
    assert context.stored_count > 5
    assert held(pager) == 0


# Beside other hooks, modes and threads.


def test_nested_contexts_count_where_they_are_innermost(pager):
    a = leaf(64, 64)
    with pager.activations(min_bytes=0) as outer:
        b = a.exp()
        with pager.activations(min_bytes=MIB) as inner:
            c = b.sin()  # stored by the outer one already
            d = (c * 2).sin()
        with save_on_cpu():
            e = d.exp()
        with saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
            f = e.exp()
        with outer:
            g = f.exp()
    assert (outer.stored_count, inner.stored_count, inner.shared_count) == (2, 0, 1)
    g.sum().backward()
    assert held(pager) == 0


def test_without_gradients_nothing_is_stored(pager):
    a = leaf(64, 64)
    with pager.activations(min_bytes=0) as saved:
        with torch.no_grad():
            a.exp().sin()
        with torch.inference_mode():
            a.exp().sin()
        a.detach().exp().sin()
    assert (saved.stored_count, saved.left_count) == (0, 0)


def test_backward_in_other_threads_and_forward_in_several(make_pager):
    pager = make_pager(device_bytes=MIB // 2)
    torch.manual_seed(0)
    model, inputs = attention()
    expected = [bits(value) for value in gradients(model, inputs, contextlib.nullcontext())]
    models = [attention()[0] for _ in range(3)]
    found, errors = {}, []

    def work(number):
        try:
            copy = models[number]
            copy.load_state_dict(model.state_dict())
            copy.zero_grad()

            x = inputs.clone().requires_grad_()
            copy.eval()
            with pager.activations(min_bytes=512):
                loss = copy(x).square().sum()
            backward = threading.Thread(target=loss.backward)
            backward.start()
            backward.join()
            found[number] = [bits(value) for value in (loss, x.grad, *(p.grad for p in copy.parameters()))]
        except BaseException as error:
            errors.append(error)

    model.eval()
    expected = [bits(value) for value in gradients(model, inputs, contextlib.nullcontext())]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(found[number] == expected for number in range(3))


class Scale(torch.autograd.Function):
    """Changes its first input, saves inputs and an output, and changes a saved tensor in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        x.mul_(2)
        ctx.mark_dirty(x)
        result = x.exp()
        ctx.save_for_backward(x, weight, result)
        return x, result

    @staticmethod
    def backward(ctx, for_x, for_result):
        x, weight, result = ctx.saved_tensors
        gradient = for_x + for_result * result
        return gradient * 2, (gradient.clone().mul_(weight) + x * torch.zeros_like(x)).sum(0)


def test_a_custom_function_saves_inputs_and_outputs_and_marks_dirty(pager):
    def run(context):
        torch.manual_seed(0)
        a, weight = leaf(40, 40), leaf(40)
        with context:
            x, result = Scale.apply(a * 1, weight * 2)
            loss = (x.sin() + result).sum()
        loss.backward()
        return bits(a.grad), bits(weight.grad)

    assert run(pager.activations(min_bytes=0)) == run(contextlib.nullcontext())
    assert held(pager) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_saves_its_views_once(pager, causal):
    def run(context):
        torch.manual_seed(0)
        a = leaf(2, 32, 3 * 64)
        with context:
            q, k, v = (
                part.view(2, 32, 4, 16).transpose(1, 2) for part in (a * 1).chunk(3, dim=-1)
            )
            loss = scaled_dot_product_attention(q, k, v, is_causal=causal).square().sum()
        loss.backward()
        return bits(a.grad)

    context = pager.activations(min_bytes=2048)
    assert run(context) == run(contextlib.nullcontext())
    assert context.stored_bytes == (3 + 1) * 2 * 32 * 64 * 4  # queries, keys and values in one storage; the result


def test_autocast_gives_the_gradients_of_plain_torch(pager):
    torch.manual_seed(0)
    model, inputs = attention()

    def run(context):
        with torch.autocast("cpu", torch.bfloat16):
            return [bits(value) for value in gradients(model, inputs, context)]

    assert run(pager.activations(min_bytes=512)) == run(contextlib.nullcontext())


def test_vmap_inside_works_and_gradient_transforms_are_refused_by_name(pager):
    a = leaf(8, 64)
    with pager.activations(min_bytes=0) as saved:
        torch.vmap(lambda row: row.exp().sin())(a).sum().backward()
    stored, a.grad = bits(a.grad), None
    a.exp().sin().sum().backward()
    assert bits(a.grad) == stored and saved.stored_count > 0
    with pytest.raises(RuntimeError, match="saved tensor hooks"), pager.activations():
        torch.func.grad(lambda x: x.exp().sum())(torch.randn(64))


def test_scratch_memory_that_backward_writes_is_not_taken_for_read(make_pager):
    """oneDNN's recurrent layers save a workspace and work in it: its pages change."""
    pager = make_pager(device_bytes=2 * MIB)
    torch.manual_seed(0)
    layer, x = nn.LSTM(32, 32, batch_first=True), leaf(4, 32, 32)

    def run(context):
        x.grad = None
        with context:
            loss = layer(x)[0].square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return bits(x.grad)

    assert run(pager.activations(min_bytes=512)) == run(contextlib.nullcontext())
