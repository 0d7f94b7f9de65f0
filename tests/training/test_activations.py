# SPDX-License-Identifier: Apache-2.0
"""What autograd saves lies in pages: which tensors, how often, for how long, and with which errors."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from activating import PAGE, bits, held, leaf, nodes_of, real_pager, saved_by
from pagers import MIB
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pagert
from pagert.errors import ConfigurationError, PagerClosed, TierFull
from pagert.tensor import PagedTensor


@pytest.fixture
def pager():
    yield from real_pager()


# What is stored, and how often.


def test_a_tensor_saved_twice_is_stored_once(pager):
    a = leaf(40, 40) * 2
    with pager.activations(min_bytes=0) as saved:
        first, second, third = a.sin(), a.cos(), a.view(-1).exp().log()
    assert saved.stored_bytes == 2 * a.nbytes  # a, and the result of exp, which log saves too
    assert saved.shared_count == 3 - 1
    (first.sum() + second.sum() + third.sum()).backward()
    assert held(pager) == 0


def test_views_of_one_storage_are_stored_once_with_their_own_layout(pager):
    a = leaf(8, 6, 96) * 2
    q, k, v = a.chunk(3, dim=-1)
    with pager.activations(min_bytes=0) as saved:
        results = [q.transpose(1, 2).sin(), k.sin(), v[:, ::2].sin(), a.sin()]
    assert (saved.stored_bytes, saved.stored_count, saved.shared_count) == (a.nbytes, 1, 3)
    for view, result in zip([q.transpose(1, 2), k, v[:, ::2], a], results, strict=True):
        back = saved_by(result.grad_fn)["_saved_self"]
        assert type(back) is PagedTensor
        assert (back.stride(), back.shape) == (view.stride(), view.shape)
        assert bits(back) == bits(view)


def test_a_storage_changed_between_two_saves_is_stored_twice(pager):
    a = torch.randn(40, 40)
    weight = leaf(40, 40)
    with pager.activations(min_bytes=0) as saved:
        first = weight * a
        before = bits(a)
        saved_first = first.grad_fn
        a.view(-1).mul_(2)
        second = weight * a
    assert saved.stored_bytes == 2 * a.nbytes
    assert bits(saved_by(second.grad_fn)["_saved_other"]) == bits(a) != before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _ = saved_first._saved_other


def test_a_counter_of_its_own_is_not_taken_for_that_of_the_storage(pager):
    """`x.data` counts its versions for itself: equal numbers say nothing about equal bytes."""
    a, weight = torch.randn(40, 40), leaf(40, 40)
    with pager.activations(min_bytes=0):
        first = weight * a
        stranger = a.data
        stranger.add_(1)  # one version on, by its own counter
        second = weight * stranger
        stranger.add_(1)
        a.add_(1)  # as many versions on as `stranger` was when it was saved
        third = weight * a
    del first, second
    assert bits(saved_by(third.grad_fn)["_saved_other"]) == bits(a)


def test_a_new_storage_at_an_old_address_is_stored_anew(pager):
    weight, results = leaf(64, 64), []
    with pager.activations(min_bytes=0) as saved:
        for number in range(50):
            a = torch.full((64, 64), float(number))
            results.append(weight * a)
            del a
    assert saved.stored_count == 50
    for number, result in enumerate(results):
        assert float(saved_by(result.grad_fn)["_saved_other"][5, 5]) == number


def test_a_small_view_of_a_large_storage_moves_only_what_it_touches(pager):
    large = torch.randn(100, 4096)
    weight = leaf(2, 4096)
    with pager.activations(min_bytes=0) as saved:
        result = weight * large[7:9]
    assert 2 * 4096 * 4 <= saved.stored_bytes < 2 * 4096 * 4 + 64
    reference = StorageWeakRef(large.untyped_storage())
    expected = bits(large[7:9])
    del large
    assert reference.expired()
    assert bits(saved_by(result.grad_fn)["_saved_other"]) == expected


def test_a_view_too_small_to_store_does_not_keep_its_storage(pager):
    large, weight = torch.randn(512, 512), leaf(4, 8)
    part = large[3:7, 100:164:8]
    expected, stride = bits(part), part.stride()
    with pager.activations(min_bytes=64 * 1024) as saved:
        result = weight * part
    reference = StorageWeakRef(large.untyped_storage())
    del large, part
    assert reference.expired() and saved.stored_count == 0
    back = saved_by(result.grad_fn)["_saved_other"]
    assert (bits(back), back.stride()) == (expected, stride)


def test_the_originals_memory_is_free_when_it_is_stored(pager):
    a = leaf(100, 100) * 2
    reference = StorageWeakRef(a.untyped_storage())
    with pager.activations(min_bytes=0):
        result = a.exp()
        output = StorageWeakRef(result.untyped_storage())
        loss = result.sum()
    del a, result
    assert reference.expired() and output.expired()
    loss.backward()


def test_parameters_paged_tensors_and_leaves_are_not_stored_again(pager):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    model[1].requires_grad_(False)
    pager.page_(model[0], min_bytes=0)
    x = leaf(1, 64)
    with pager.activations(min_bytes=1024) as saved:
        model(x).sum().backward()
    assert saved.stored_count == 0 and saved.left_count >= 5
    assert "0 saved tensors went to pages" in str(saved)


def test_buffers_of_a_module_that_is_named_are_not_stored(pager):
    model = nn.Module()
    model.register_buffer("table", torch.randn(64, 64))
    x = leaf(64, 64)
    for module, count in ((None, 1), (model, 0)):
        with pager.activations(min_bytes=0, module=module) as saved:
            _ = x * model.table.T
        assert saved.stored_count == count


@pytest.mark.parametrize("kind", ["sparse", "meta", "tiny", "empty", "subclass", "scalar"])
def test_what_cannot_be_paged_is_left(pager, kind):
    class Odd(torch.Tensor):
        pass

    other = {
        "sparse": lambda: torch.eye(64).to_sparse(),
        "meta": lambda: torch.randn(64, 64, device="meta"),
        "tiny": lambda: torch.randn(2, 2),
        "empty": lambda: torch.randn(0, 64),
        "subclass": lambda: torch.randn(64, 64).as_subclass(Odd),
        "scalar": lambda: torch.tensor(2.0),
    }[kind]()
    weight = torch.randn(other.shape, device=other.device).requires_grad_()
    with pager.activations(min_bytes=1024) as saved:
        result = weight * other
    assert saved.stored_count == 0 and saved.left_count
    (back,) = [saved_by(node)["_saved_other"] for node in nodes_of(result) if hasattr(node, "_saved_other")]
    assert type(back) is type(other) and back.layout is other.layout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_dtypes_masks_and_indices_come_back(pager, dtype):
    a = leaf(40, 40, dtype=dtype)
    mask, index = torch.rand(40, 40) > 0.5, torch.randint(40, (64, 40))

    def run(context):
        a.grad = None
        with context:
            b = (a * 2).conj() if dtype.is_complex else a * 2
            loss = b * b.masked_fill(mask, 0).gather(0, index).sum()
            (loss.abs() if dtype.is_complex else loss).sum().backward()
        return bits(a.grad)

    context = pager.activations(min_bytes=512)
    assert run(context) == run(contextlib.nullcontext())
    assert context.stored_count >= 3


# How long.


@pytest.mark.parametrize("retain", [False, True])
def test_pages_go_as_soon_as_backward_has_used_them(pager, retain):
    a = leaf(64, 64)
    with pager.activations(min_bytes=0):
        b = a.sin()
        c = (b * 3).exp()
    seen = []
    b.register_hook(lambda gradient: seen.append(held(pager)))
    c.sum().backward(retain_graph=retain)
    assert seen == [c.nbytes if retain else 0]
    if retain:
        first, a.grad = bits(a.grad), None
        c.sum().backward()
        assert bits(a.grad) == first
    assert held(pager) == 0


def test_under_lru_pages_are_fetched_in_the_reverse_order_ahead_of_their_use():
    settings = {"device_bytes": MIB, "host_bytes": 8 * MIB, "page_bytes": PAGE, "policy": "lru"}
    with pagert.Pager(device="cpu", **settings) as pager:
        a = leaf(128, 128)
        with pager.activations() as saved:
            values = [a]
            for _ in range(40):
                values = [values[0].sin()]
        assert saved.stored_bytes > 2 * MIB
        pager.reset_stats()
        values[0].sum().backward()
        stats = pager.stats()
        assert stats.prefetches * PAGE >= MIB and stats.faults * PAGE < MIB // 4


def test_a_graph_that_is_dropped_gives_back_its_pages_without_gc(pager):
    gc.collect()
    gc.disable()
    try:
        a = leaf(64, 64)
        for _ in range(3):
            with pager.activations(min_bytes=0):
                loss = (a.exp() * a.exp().sigmoid()).sum()
            assert held(pager) > 0
            del loss
            assert held(pager) == 0
    finally:
        gc.enable()


def test_a_pager_goes_without_gc_after_its_contexts():
    gc.collect()
    gc.disable()
    try:
        pager = pagert.Pager(device="cpu", device_bytes=MIB, host_bytes=MIB, page_bytes=PAGE)
        with pager, pager.activations(min_bytes=0) as saved:
            leaf(64, 64).exp().sum().backward()
        references = weakref.ref(pager), weakref.ref(saved)
        del pager, saved
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_second_derivatives_are_those_of_plain_torch(pager):
    def run(context, inner):
        torch.manual_seed(3)
        a = leaf(40, 40)
        with context:
            loss = (a.exp() * a.sin()).tanh().sum()
        with inner:
            (first,) = torch.autograd.grad(loss, a, create_graph=True)
        (first * first).sum().backward()
        return bits(first), bits(a.grad)

    plain = run(contextlib.nullcontext(), contextlib.nullcontext())
    assert run(pager.activations(min_bytes=0), contextlib.nullcontext()) == plain
    gc.collect()  # create_graph=True leaves cycles, as PyTorch warns
    assert run(pager.activations(min_bytes=0), pager.activations(min_bytes=0)) == plain
    gc.collect()
    assert held(pager) == 0


# Errors.


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("through", ["itself", "view", "detach", "base", "gone"])
def test_an_inplace_change_of_a_saved_tensor_is_still_an_error(pager, through, stored):
    def run(context):
        base = leaf(40, 40) * 2
        a = base.view(-1) if through in ("base", "gone") else base
        with context:
            loss = a.sin().sum()
        changed = {"itself": a, "view": a.view(-1), "detach": a.detach(), "base": base, "gone": base}[through]
        if through == "gone":
            del a
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        # PyTorch names the node that it finds for a view after the change.
        return str(caught.value).replace("of AsStrided,", "of View,")

    context = pager.activations(min_bytes=0 if stored else MIB)
    assert run(context) == run(contextlib.nullcontext())
    assert (context.stored_count > 0) is stored


def test_a_saved_result_that_is_changed_is_an_error(pager):
    with pager.activations(min_bytes=0):
        result = leaf(40, 40).exp()
        loss = (result + 1).sum()
    result.data.zero_()  # behind autograd's back: what was saved stays what it was
    loss.backward()
    with pager.activations(min_bytes=0):
        result = leaf(40, 40).exp()
        loss = (result + 1).sum()
    result.detach().zero_()
    with pytest.raises(RuntimeError, match="output 0 of Exp, is at version 1; expected version 0"):
        loss.backward()


def test_a_second_backward_without_retain_graph_is_pytorchs_error(pager):
    with pager.activations(min_bytes=0):
        loss = leaf(40, 40).exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_full_tier_says_what_did_not_fit_and_the_remedy():
    with pagert.Pager(device="cpu", device_bytes=MIB // 2, host_bytes=MIB // 2, page_bytes=PAGE) as pager:
        kept = []
        context = pager.activations(min_bytes=0)
        a = leaf(200, 200)
        with pytest.raises(TierFull) as caught, context:
            for _ in range(20):
                kept.append(a.exp())
        assert "(200, 200) float32, 156.25 KiB" in str(caught.value)
        assert "min_bytes" in str(caught.value) and "checkpoint" in str(caught.value)
        kept.pop().sum().backward()  # what was saved is good
        kept.clear()
        del caught
        assert held(pager) == 0
        with context:
            a.exp().sum().backward()


def test_an_activation_larger_than_the_device_is_stored_and_comes_back(make_pager):
    pager = make_pager(device_bytes=MIB // 4)
    a = leaf(300, 400)
    with pager.activations() as saved:
        loss = (a * 2).sin()[:, :390].exp().mul(0.5).expand(2, 300, 390).sum()
    assert saved.stored_bytes > 1.9 * a.nbytes
    loss.backward()
    stored, a.grad = bits(a.grad), None
    (a * 2).sin()[:, :390].exp().mul(0.5).expand(2, 300, 390).sum().backward()
    assert bits(a.grad) == stored


def test_bad_settings_are_refused(pager):
    with pytest.raises(ConfigurationError, match="min_bytes=-1"):
        pager.activations(min_bytes=-1)
    context = pager.activations()
    pager.close()
    with pytest.raises(PagerClosed):
        pager.activations()
    with pytest.raises(PagerClosed), context:
        pass


def test_backward_after_close_says_so(pager):
    with pager.activations(min_bytes=0):
        loss = leaf(40, 40).exp().sum()
    pager.close()
    with pytest.raises(PagerClosed):
        loss.backward()


def test_statistics_say_what_is_stored():
    with pagert.Pager(device="cpu", device_bytes=MIB, host_bytes=MIB, page_bytes=PAGE) as pager:
        assert pager.stats().activation_bytes == pager.stats().activation_stored_bytes == 0
        with pager.activations() as saved:
            loss = leaf(64, 64).exp().sum()
        assert pager.stats().activation_bytes == saved.stored_bytes == 64 * 64 * 4
        loss.backward()
        stats = pager.stats()
        assert (stats.activation_bytes, stats.activation_stored_bytes) == (0, 64 * 64 * 4)
        assert stats.reserved_bytes == 0
        pager.reset_stats()
        assert pager.stats().activation_stored_bytes == 0
