# SPDX-License-Identifier: Apache-2.0
"""Views of paged tensors share bytes, versions and ties with their base, and move nothing."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch

from pagert.tensor import PagedTensor

VIEWS = {
    "view": lambda t: t.view(-1),
    "view_dtype": lambda t: t.view(torch.int16),
    "reshape": lambda t: t.reshape(6, -1),
    "t": lambda t: t[0].t(),
    "transpose": lambda t: t.transpose(0, 2),
    "permute": lambda t: t.permute(2, 0, 1),
    "mT": lambda t: t.mT,
    "select": lambda t: t[1],
    "slice": lambda t: t[:, 1:3],
    "step": lambda t: t[..., ::2],
    "ellipsis": lambda t: t[None, ..., 0],
    "narrow": lambda t: t.narrow(1, 1, 2),
    "expand": lambda t: t[:1].expand(5, -1, -1),
    "expand_as": lambda t: t[:1].expand_as(t),
    "broadcast_to": lambda t: t[0, 0].broadcast_to(7, 6),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t[:1].squeeze(0),
    "detach": lambda t: t.detach(),
    "alias": lambda t: torch.ops.aten.alias(t),
    "unfold": lambda t: t.unfold(2, 3, 2),
    "diagonal": lambda t: t.diagonal(0, 1, 2),
    "as_strided": lambda t: t.as_strided((3, 2), (2, 7), 5),
    "flatten": lambda t: t.flatten(1),
    "unflatten": lambda t: t.unflatten(2, (2, 3)),
    "movedim": lambda t: t.movedim(0, 2),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "real": lambda t: t.view(torch.complex64).real,
    "imag": lambda t: t.view(torch.complex64).imag,
    "view_as_real": lambda t: torch.view_as_real(t.view(torch.complex64)),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(4, 4, 3, 2)),
    "conj": lambda t: t.view(torch.complex64).conj(),
    "conj_imag": lambda t: t.view(torch.complex64).conj().imag,
    "neg_view": lambda t: torch._neg_view(t),
    "adjoint": lambda t: t.view(torch.complex64).adjoint(),
    "positive": lambda t: +t,
    "split": lambda t: t.split(2, 1)[1],
    "split_sizes": lambda t: t.split([1, 2, 1], 1)[1],
    "chunk": lambda t: t.chunk(3, 2)[2],
    "tensor_split": lambda t: t.tensor_split(3, 1)[1],
    "hsplit": lambda t: t.hsplit(2)[1],
    "unbind": lambda t: t.unbind(1)[3],
    "unsafe_chunk": lambda t: t.unsafe_chunk(2, 0)[1],
    "iteration": lambda t: list(t)[2],
    "data": lambda t: t.data,
    "contiguous": lambda t: t.contiguous(),
    "to_nothing_new": lambda t: t.to(torch.float32),
    "zero_size": lambda t: t[2:2],
}


def samples():
    torch.manual_seed(0)
    return torch.randn(4, 4, 6)


def bits(tensor):
    return torch.clone(tensor.resolve_neg().resolve_conj()).cpu()


@pytest.mark.parametrize("name", VIEWS)
def test_view_has_the_geometry_and_the_bytes_of_a_plain_view(pager, name):
    plain = samples()
    paged = pager.tensor(plain)
    one, other = VIEWS[name](paged), VIEWS[name](plain)
    assert type(one) is PagedTensor
    assert one.shape == other.shape and one.stride() == other.stride()
    assert one.storage_offset() == other.storage_offset() and one.dtype == other.dtype
    assert one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()
    assert one._region is paged._region
    assert torch.equal(one.cpu().clone(), other)


@pytest.mark.parametrize("name", VIEWS)
def test_write_through_a_view_reaches_the_base_and_its_version(pager, name):
    plain = samples()
    paged = pager.tensor(plain)
    version = paged._version
    one, other = VIEWS[name](paged), VIEWS[name](plain)
    if name in ("expand", "expand_as", "broadcast_to"):
        with pytest.raises(RuntimeError, match="single memory location"):
            one.add_(1)
        return
    if one.is_floating_point() or one.is_complex():
        one.mul_(3).add_(1)
        other.mul_(3).add_(1)
    else:
        one.bitwise_xor_(5)
        other.bitwise_xor_(5)
    paged.evict()
    assert torch.equal(paged, plain)
    if name not in ("data", "unsafe_chunk"):  # as for a plain tensor
        assert paged._version > version
    again = VIEWS[name](paged)
    assert torch.equal(again, other)


@pytest.mark.parametrize("name", VIEWS)
def test_view_pins_nothing(pager, name):
    paged = pager.tensor(samples())
    if not hasattr(pager.pump, "pins"):
        before = pager.stats()
        VIEWS[name](paged)
        after = pager.stats()
        assert (after.hits, after.faults) == (before.hits, before.faults)
        return
    pins = pager.pump.pins
    VIEWS[name](paged)
    assert pager.pump.pins == pins


IN_PLACE_VIEWS = {
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "squeeze_": lambda t: t.unsqueeze_(1).squeeze_(),
    "squeeze_dim_": lambda t: t.unsqueeze_(1).squeeze_(1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "as_strided_": lambda t: t.as_strided_((2, 2), (3, 1), 4),
    "resize_smaller": lambda t: t.resize_(2, 5),
    "detach_": lambda t: t.detach_(),
}


@pytest.mark.parametrize("name", IN_PLACE_VIEWS)
def test_in_place_view_changes_the_object_itself(pager, name):
    plain = torch.arange(24.0).view(4, 6).clone()
    paged = pager.tensor(plain)
    whole = paged.view(-1)
    assert IN_PLACE_VIEWS[name](paged) is paged
    IN_PLACE_VIEWS[name](plain)
    assert paged.shape == plain.shape and paged.stride() == plain.stride()
    assert torch.equal(paged, plain)
    paged.add_(1)
    assert torch.equal(whole[:4], torch.clone(paged.as_strided((4,), (1,), 0)))


def test_illegal_change_through_a_view_is_refused_by_autograd(pager):
    weight = pager.tensor(torch.randn(4, 4), requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        weight.view(-1)[3].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_change_of_a_leaf_through_a_view_is_refused_by_autograd(pager):
    weight = pager.tensor(torch.randn(4, 4), requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        weight.view(-1).add_(1)


def test_view_in_the_graph_gives_the_plain_gradient(pager):
    plain = torch.randn(4, 6, requires_grad=True)
    paged = pager.tensor(plain.detach(), requires_grad=True)
    for leaf in (plain, paged):
        (
            leaf.t()[1:3] * leaf[:2].reshape(3, 4)[:2] * leaf.unfold(1, 2, 2).sum(0)[:2, :1]
        ).sum().backward()
    assert torch.equal(paged.grad, plain.grad)


def test_view_beyond_the_region_is_refused(pager):
    paged = pager.tensor(torch.arange(10.0))
    with pytest.raises(RuntimeError, match="out of bounds"):
        paged.as_strided((100,), (1,))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        paged.view(7)


def test_view_keeps_the_region_alive_and_nothing_else_does(pager):
    if not hasattr(pager.pump, "live_regions"):
        pytest.skip("counts the regions of the fake runtime")
    paged = pager.tensor(torch.arange(100.0))
    view = paged[10:20]
    del paged
    assert pager.pump.live_regions == 1
    assert torch.equal(view, torch.arange(10.0, 20.0))
    del view
    assert pager.pump.live_regions == 0


def test_view_touches_only_its_own_pages(pager):
    paged = pager.tensor(torch.arange(100_000, dtype=torch.int32))
    if not hasattr(pager.pump, "recorded"):
        pytest.skip("looks at the pins of the fake runtime")
    pager.pump.recorded = []
    torch.clone(paged.cpu()[5000:5010].neg())
    assert pager.pump.recorded == [[(20000, 40, 0)]]


def test_inference_mode_reads_and_converts(pager):
    plain = samples()
    paged = pager.tensor(plain)
    with torch.inference_mode():
        assert torch.equal(paged.to(torch.bfloat16), plain.to(torch.bfloat16))
        assert torch.equal(paged.reshape(-1, 3), plain.reshape(-1, 3))
        assert torch.equal(paged.transpose(0, 1).contiguous(), plain.transpose(0, 1).contiguous())
        assert torch.equal(
            torch.nn.functional.linear(paged, paged[0]), torch.nn.functional.linear(plain, plain[0])
        )
        assert type(paged.view(-1)) is PagedTensor


def test_alias_that_an_operator_returns_is_paged(pager):
    paged = pager.tensor(torch.arange(12.0))
    # Dropout in evaluation returns its operand's bytes without saying so in its schema.
    result = torch.ops.aten.native_dropout(paged[2:], 0.5, False)[0]
    if type(result) is PagedTensor:
        result.add_(1)
        assert torch.equal(paged[2:], torch.arange(2.0, 12.0) + 1)
    else:
        assert torch.equal(result, torch.arange(2.0, 12.0))


def test_the_same_view_twice_gives_two_tensors_with_a_geometry_of_their_own(pager):
    paged = pager.tensor(samples())
    one, other = paged.view(-1), paged.view(-1)
    assert one is not other
    one.unsqueeze_(0).t_()
    one.add_(1)
    assert one.shape == (96, 1) and other.shape == (96,) and paged.view(-1).shape == (96,)
    assert torch.equal(other, samples().view(-1) + 1)


def test_views_by_one_operator_with_other_arguments_are_not_mixed_up(pager):
    plain = samples()
    paged = pager.tensor(plain)
    for _ in range(2):
        for row in (0, 1, -1):
            assert torch.equal(paged[row], plain[row])
        for sizes in ([1, 3], [3, 1], 2):
            for one, other in zip(paged.split(sizes), plain.split(sizes), strict=True):
                assert torch.equal(one, other)
        assert paged.view(torch.int32).dtype == torch.int32
        assert paged.view(torch.int16).dtype == torch.int16


def test_view_after_the_bytes_were_exchanged_shows_the_new_ones(pager):
    paged, other = pager.tensor(samples()), pager.tensor(samples().mT.contiguous())
    before = paged.view(-1)
    paged.data = other
    assert torch.equal(paged.view(-1), samples().mT.reshape(-1))
    assert torch.equal(before, samples().view(-1))


def test_view_first_taken_in_inference_mode_is_differentiable_afterwards(pager):
    plain = samples().requires_grad_()
    paged = pager.tensor(samples(), requires_grad=True)
    with torch.inference_mode():
        assert torch.equal(paged.transpose(0, 1), plain.transpose(0, 1))
        assert torch.equal(paged * 1, plain * 1)
    for leaf in (plain, paged):
        view = leaf.transpose(0, 1)
        assert not view.is_inference()
        (view * view).sum().backward()
    assert torch.equal(paged.grad, plain.grad)


def test_tensor_that_was_used_and_looked_at_goes_with_its_last_reference(make_pager):
    pager = make_pager(device_bytes=1 << 20)
    if not hasattr(pager.pump, "state"):
        pytest.skip("counts the pages of the real pump")
    gc.disable()
    try:
        before = pager.pump.state()["reserved_pages"]
        paged = pager.tensor(samples(), requires_grad=True)
        (paged.permute(2, 0, 1) * paged.view(-1).view(6, 4, 4)).sum().backward()
        with torch.no_grad():
            paged.add_(paged.grad)
        del paged
        pager.zeros(1)  # what was let go of is released at the next call
        assert pager.pump.state()["reserved_pages"] <= before + 1
    finally:
        gc.enable()


def test_views_of_views_without_end_take_no_more_and_more_memory(pager):
    view = paged = pager.tensor(samples())
    tracemalloc.start()
    try:
        for turn in range(3001):
            view = view.detach()  # autograd keeps a chain of its own for the other views
            if turn == 1000:
                before = tracemalloc.get_traced_memory()[0]
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
    assert torch.equal(view, samples()) and torch.equal(paged, samples())
