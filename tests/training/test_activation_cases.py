# SPDX-License-Identifier: Apache-2.0
"""Cases that users of activation offload met elsewhere (C1, C4, C6, C8): each by its id."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from activating import bits, real_pager
from pagers import MIB
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import pagert
from pagert.tensor import PagedTensor


@pytest.fixture
def pager():
    yield from real_pager()


class Keepless(torch.autograd.Function):
    """A function that saves its result and holds no other reference to it."""

    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result.t())
        return result.sum(0)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].t() * gradient


def test_c1_memory_of_a_saved_tensor_that_is_used_again_at_once_does_not_change_gradients(make_pager):
    pager = make_pager(device_bytes=MIB // 8)
    a = torch.randn(64, 48, requires_grad=True)
    for _ in range(100):
        a.grad = None
        with pager.activations(min_bytes=0):
            result = Keepless.apply(a)
            for _ in range(4):
                torch.full((64, 48), float("nan"))  # of the size that has just become free
            loss = (result * result).sum()
        loss.backward()
        stored, a.grad = bits(a.grad), None
        result = Keepless.apply(a)
        (result * result).sum().backward()
        assert bits(a.grad) == stored


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "strided slice": lambda x: x[3:50:2, 1::3],
    "expanded": lambda x: x[5].expand(200, 64),
    "expanded scalar": lambda x: x[5, 5].expand(64, 64),
    "channels last": lambda x: x.view(2, 4, 8, 64).contiguous(memory_format=torch.channels_last),
    "overlapping": lambda x: x.as_strided((60, 60), (8, 2), 10),
    "permuted slice": lambda x: x.view(4, 16, 64)[1:3].permute(2, 0, 1),
    "other dtype": lambda x: x.view(torch.int32)[4:40].view(torch.float32),
    "flipped": lambda x: x.flip(0)[1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c4_layouts_come_back_and_no_more_than_the_storage_is_moved(pager, layout):
    torch.manual_seed(0)
    saved = LAYOUTS[layout](torch.randn(64, 64))
    weight = torch.randn(saved.shape).requires_grad_()
    with pager.activations(min_bytes=0) as context:
        result = weight * saved
    assert context.stored_count == 1 and context.stored_bytes <= saved.untyped_storage().nbytes()
    back = result.grad_fn._saved_other
    assert type(back) is PagedTensor
    back.evict()
    assert (back.shape, back.stride(), back.dtype) == (saved.shape, saved.stride(), saved.dtype)
    assert bits(back) == bits(saved)
    result.sum().backward()
    assert bits(weight.grad) == bits(saved)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "channels last", "overlapping"])
def test_c4_layouts_larger_than_the_device_come_back(layout):
    with pagert.Pager(device="cpu", device_bytes=MIB // 16, host_bytes=8 * MIB, page_bytes=4096) as pager:
        x = torch.randn(512, 64)
        saved = {
            "transposed": lambda: x.t(),
            "expanded": lambda: x[:300].expand(3, 300, 64),
            "channels last": lambda: x.view(4, 16, 8, 64).contiguous(memory_format=torch.channels_last),
            "overlapping": lambda: x.as_strided((700, 60), (40, 2), 10),
        }[layout]()
        weight = torch.randn(saved.shape).requires_grad_()
        with pager.activations() as context:
            result = weight * saved
        assert 0 < context.stored_bytes <= x.nbytes
        back = result.grad_fn._saved_other
        assert back.stride() == saved.stride() and bits(back) == bits(saved)


class Block(nn.Module):
    """Two linear layers of which one weight is shared with every other block."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, nn.Linear(32, 32)

    def forward(self, given):
        x = given["x"] if isinstance(given, dict) else given[0] if isinstance(given, (list, tuple)) else given
        return torch.tanh(self.own(torch.sigmoid(self.shared(x)))) + x


def shared_blocks(inputs, run, outer, recompute):
    torch.manual_seed(0)
    shared = nn.Linear(32, 32)
    blocks = nn.ModuleList(Block(shared) for _ in range(3))
    x = torch.randn(16, 32, requires_grad=True)
    with outer:
        hidden = x * 1
        for block in blocks:
            given = {"tensor": hidden, "list": [hidden], "dict": {"x": hidden}}[inputs]
            hidden = run(block, given)
        loss = hidden.square().sum()
    with recompute:
        loss.backward()
    return [bits(loss), bits(x.grad), *(bits(parameter.grad) for parameter in blocks.parameters())]


@pytest.mark.parametrize(
    ("inputs", "reentrant"),
    # The reentrant kind does not see inputs in lists and dicts: no gradient in plain PyTorch either.
    [("tensor", True), ("tensor", False), ("list", False), ("dict", False)],
)
@pytest.mark.parametrize("place", ["outside", "inside", "inside and around backward"])
def test_c6_checkpoints_compose_with_activations(pager, inputs, reentrant, place):
    none = contextlib.nullcontext
    context = pager.activations(min_bytes=0)

    def inside(block, given):
        return checkpoint(block, given, use_reentrant=reentrant)

    def outside(block, given):
        def paged(given):
            with context:
                return block(given)

        return checkpoint(paged, given, use_reentrant=reentrant)

    expected = shared_blocks(inputs, inside, none(), none())
    if place == "outside":
        found = shared_blocks(inputs, outside, none(), none())
    else:
        around = pager.activations(min_bytes=0) if place != "inside" else none()
        found = shared_blocks(inputs, inside, context, around)
    assert found == expected
    assert context.stored_count > 0
    gc.collect()
    assert pager.stats().activation_bytes == 0


def test_c6_that_nothing_was_stored_is_visible(pager, caplog):
    caplog.set_level("INFO", "pagert")
    layer = nn.Linear(8, 8)
    with pager.activations() as saved:
        layer(torch.randn(4, 8)).sum().backward()
    assert (saved.stored_count, saved.stored_bytes, pager.stats().activation_stored_bytes) == (0, 0, 0)
    assert saved.left_count > 0
    assert "0 B of 0 saved tensors went to pages" in caplog.text


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_c6_compiled_code_has_the_gradients_of_plain_torch(pager, backend):
    def forward(x, weight):
        return (torch.tanh(x @ weight) * x.exp()).square()

    def run(context):
        torch.manual_seed(0)
        x, weight = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
        torch._dynamo.reset()
        with context:
            loss = torch.compile(forward, backend=backend)(x, weight).sum()
        loss.backward()
        return bits(loss), bits(x.grad), bits(weight.grad)

    context = pager.activations(min_bytes=0)
    assert run(context) == run(contextlib.nullcontext())
    assert context.stored_count > 0


def test_c8_pages_do_not_grow_over_100_iterations_without_gc(pager):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, 16, 16, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for iteration in range(100):
            with contextlib.suppress(ZeroDivisionError), pager.activations(min_bytes=0) as saved:
                result = layer(x).mul_(2)
                result[0].add_(1)  # in place, on a view
                if iteration % 3 == 0:
                    raise ZeroDivisionError
                if iteration % 3 == 1:
                    result.sum().backward()
            assert saved.stored_count > 0
            reference = StorageWeakRef(result.untyped_storage())
            del result
            stats = pager.stats()
            assert (stats.reserved_bytes, stats.activation_bytes) == (0, 0)
            assert reference.expired()
        assert len(pager._saved._by_storage) < 200
    finally:
        gc.enable()


def test_c8_an_operator_that_fails_inside_leaves_nothing(pager):
    gc.collect()
    gc.disable()
    try:
        a = torch.randn(64, 64, requires_grad=True)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), pager.activations(min_bytes=0):
                a.exp() @ torch.randn(3, 64)
            assert pager.stats().reserved_bytes == 0
    finally:
        gc.enable()
