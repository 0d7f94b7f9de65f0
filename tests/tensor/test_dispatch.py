# SPDX-License-Identifier: Apache-2.0
"""Operators on paged operands:

results, in-place and out=, what is fetched, what happens on errors.
"""

from __future__ import annotations

import pytest
import torch

from pagert.errors import ForeignTensor, OutOfFrames, UnsupportedOperator
from pagert.tensor import PagedTensor

READ, UPDATE, OVERWRITE = range(3)


@pytest.fixture
def modes(pager):
    """Return a function that runs a call and gives the modes of its pins."""
    if not hasattr(pager.pump, "recorded"):
        pytest.skip("looks at the pins of the fake runtime")

    def record(call):
        pager.pump.recorded = []
        call()
        recorded, pager.pump.recorded = pager.pump.recorded, None
        return [[mode for _, _, mode in accesses] for accesses in recorded]

    return record


def test_results_are_plain_and_in_place_returns_the_same_object(pager):
    plain, paged = torch.randn(8, 8), None
    paged = pager.tensor(plain)
    assert type(paged + 1) is torch.Tensor and type(paged @ paged) is torch.Tensor
    for call in (
        lambda t: t.add_(1),
        lambda t: t.mul_(t),
        lambda t: t.copy_(t.t() + 1),
        lambda t: t.clamp_(0),
        lambda t: torch.relu_(t),
        lambda t: t.masked_fill_(t > 1, 0),
        lambda t: t.index_add_(0, torch.tensor([1]), t[:1] + 0),
    ):
        assert call(paged) is paged
        call(plain)
        paged.evict()
        assert torch.equal(paged, plain)


def test_paged_and_plain_operands_mix(pager):
    left, right = torch.randn(5, 5), torch.randn(5, 5)
    paged = pager.tensor(left)
    assert torch.equal(torch.addmm(right, paged, right), torch.addmm(right, left, right))
    assert torch.equal(paged * torch.tensor(2.0), left * 2)
    assert torch.equal(right.clone().add_(paged), right + left)
    assert torch.equal(torch.cat([right, paged, right]), torch.cat([right, left, right]))
    assert torch.equal(torch.where(paged > 0, paged, right), torch.where(left > 0, left, right))


def test_the_same_tensor_and_overlapping_views_in_one_call(pager):
    plain = torch.randn(3000)
    paged = pager.tensor(plain)
    assert torch.equal(paged * paged, plain * plain)
    assert torch.equal(paged[:2000] + paged[1000:], plain[:2000] + plain[1000:])
    paged[:1000].copy_(paged[2000:])
    plain[:1000].copy_(plain[2000:])
    paged[0:2000:2].add_(paged[1:2000:2])
    plain[0:2000:2].add_(plain[1:2000:2])
    paged.evict()
    assert torch.equal(paged, plain)


def test_what_is_written_whole_is_not_fetched(pager, modes):
    paged = pager.tensor(torch.randn(64, 64))
    other = torch.randn(64, 64)
    assert modes(lambda: paged.copy_(other)) == [[OVERWRITE]]
    assert modes(lambda: paged.zero_()) == [[OVERWRITE]]
    assert modes(lambda: paged.fill_(3.0)) == [[OVERWRITE]]
    assert modes(lambda: paged.normal_()) == [[OVERWRITE]]
    assert modes(lambda: paged.uniform_(0, 1)) == [[OVERWRITE]]
    assert modes(lambda: paged.t().copy_(other)) == [[OVERWRITE]]
    assert modes(lambda: torch._foreach_zero_([paged])) == [[OVERWRITE]]
    assert modes(lambda: torch._foreach_copy_([paged], [other])) == [[OVERWRITE]]
    assert modes(lambda: paged[::2].zero_()) == [[UPDATE]]
    assert modes(lambda: paged.add_(1)) == [[UPDATE]]
    assert modes(lambda: paged.copy_(other[0])) == [[UPDATE]]
    assert modes(lambda: paged.sum()) == [[READ]]
    assert modes(lambda: paged[:32].copy_(paged[32:])) == [[UPDATE, READ]]


def test_optimizer_kernels_do_not_dirty_gradients(pager, modes):
    def operands():
        return [[pager.zeros(100)] for _ in range(4)]

    steps = [torch.tensor(1.0)]
    options = {
        "amsgrad": False,
        "beta1": 0.9,
        "beta2": 0.99,
        "lr": 0.1,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "maximize": False,
    }
    parameters, gradients, first, second = operands()
    assert modes(
        lambda: torch._fused_adam_(parameters, gradients, first, second, [], steps, **options)
    ) == [[UPDATE, READ, UPDATE, UPDATE]]
    scale = {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}
    assert modes(
        lambda: torch._fused_adam_(
            parameters, gradients, first, second, [], steps, **options, **scale
        )
    ) == [[UPDATE, UPDATE, UPDATE, UPDATE]]


FAILING = {
    "copy of another shape": lambda t: t.copy_(torch.ones(7, 7)),
    "copy of a sparse tensor": lambda t: t.copy_(torch.eye(64).to_sparse().to_sparse_csr()),
    "fill with no number": lambda t: t.fill_("x"),
    "negative deviation": lambda t: t.normal_(0, -1),
    "empty interval": lambda t: t.uniform_(2, 1),
    "add of another shape": lambda t: t.add_(torch.ones(7, 7)),
    "product of another shape": lambda t: torch.mm(torch.ones(3, 3), torch.ones(4, 3), out=t),
    "list of another shape": lambda t: torch._foreach_copy_([t], [torch.ones(3)]),
    "index out of range": lambda t: torch.index_select(
        torch.ones(64, 64), 0, torch.tensor([99]), out=t
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_failed_operator_leaves_the_values_and_holds_nothing(pager, name):
    plain = torch.randn(64, 64)
    paged = pager.tensor(plain)
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        FAILING[name](paged)
    paged.evict()
    assert torch.equal(paged, plain)


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.uint8, 1000), (torch.float16, 1e10), (torch.int64, 1j)], ids=str
)
def test_fill_with_a_number_that_does_not_fit_leaves_the_values(pager, dtype, value):
    paged = pager.tensor(torch.ones(5000, dtype=dtype))
    with pytest.raises(RuntimeError):
        paged.fill_(value)
    paged.evict()
    assert paged.sum(dtype=torch.float64).item() == 5000


def test_random_numbers_are_those_of_a_plain_tensor(pager):
    plain, paged = torch.empty(40, 40), pager.empty(40, 40)
    for call in (
        lambda t: t.normal_(1, 2),
        lambda t: t.uniform_(-1, 1),
        lambda t: t.exponential_(2),
        lambda t: t.random_(0, 9),
        lambda t: t.random_(),
        lambda t: t.cauchy_(),
        lambda t: t.log_normal_(),
        lambda t: t.geometric_(0.5),
        lambda t: t.bernoulli_(0.3),
        lambda t: t.normal_(generator=torch.Generator().manual_seed(5)),
        lambda t: torch.nn.init.kaiming_uniform_(t),
        lambda t: torch.nn.init.trunc_normal_(t),
        lambda t: torch.nn.init.orthogonal_(t),
    ):
        for tensor in (plain, paged):
            torch.manual_seed(3)
            assert call(tensor) is tensor
        assert torch.equal(paged, plain)
        torch.manual_seed(3)
        call(plain)
        after = torch.rand(())
        torch.manual_seed(3)
        call(paged)
        assert torch.equal(torch.rand(()), after)


# out=


def test_out_gets_the_result_and_is_returned(pager):
    left, right = torch.randn(20, 20), torch.randn(20, 20)
    out, paged = pager.empty(20, 20), pager.tensor(left)
    assert torch.mm(paged, right, out=out) is out
    assert torch.equal(out, left @ right)
    assert torch.add(out, 1, out=out) is out
    assert torch.equal(out, left @ right + 1)
    values, indices = pager.empty(20), pager.empty(20, dtype=torch.int64)
    result = torch.max(paged, 1, out=(values, indices))
    assert result[0] is values and result[1] is indices
    assert torch.equal(values, left.max(1).values) and torch.equal(indices, left.max(1).indices)
    strided = pager.zeros(20, 40)
    torch.mul(left, 2, out=strided[:, ::2])
    assert torch.equal(strided[:, ::2], left * 2) and strided[:, 1::2].abs().sum().item() == 0


def test_out_without_elements_gets_the_result_s_shape(pager):
    out = pager.empty(0)
    assert torch.add(torch.ones(3, 3), 1, out=out) is out
    assert out.shape == (3, 3) and out.sum().item() == 18
    out.evict()
    assert out.sum().item() == 18


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_is_too_small_is_refused_and_its_neighbours_are_safe(pager):
    neighbours = [pager.tensor(torch.ones(1024)) for _ in range(8)]
    out = pager.tensor(torch.full((4,), 5.0))
    with pytest.raises(UnsupportedOperator, match="out= is paged"):
        torch.add(torch.zeros(5000), 1, out=out)
    assert out.tolist() == [5, 5, 5, 5] and all(n.sum().item() == 1024 for n in neighbours)
    torch.add(torch.zeros(2), 1, out=out)
    assert out.tolist() == [1, 1]


def test_resize_within_the_region_works_and_beyond_it_is_refused_by_name(pager):
    paged = pager.tensor(torch.arange(12.0))
    assert paged.resize_(2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert paged.resize_(12).tolist() == list(range(12))
    with pytest.raises(UnsupportedOperator, match=r"aten.resize_.*cannot grow"):
        paged.resize_(5000)
    assert paged.resize_as_(torch.empty(3, 4)).shape == (3, 4)
    assert pager.empty(0).resize_(4).shape == (4,)
    assert pager.empty(0).resize_(0, 3).shape == (0, 3)


# Errors.


def test_operands_that_do_not_fit_are_named_with_the_budget_and_the_remedy(make_pager):
    pager = make_pager(device_bytes=16 * 4096)
    left, right = pager.zeros(100, 100), pager.zeros(100, 100)
    with pytest.raises(OutOfFrames) as caught:  # no operator of those that run block by block
        torch.linalg.solve(left, right)
    message = str(caught.value)
    for part in (
        "aten._linalg_solve_ex",
        "cannot run block by block",
        "(100, 100) float32, 39.06 KiB (read)",
        "80 KiB",
        "64 KiB",
        "device_bytes",
    ):
        assert part in message, message
    assert isinstance(caught.value, MemoryError)
    assert (left + 1).sum().item() == 10000


def test_operands_that_do_not_fit_beside_a_pin_fit_when_it_is_gone(make_pager):
    pager = make_pager(device_bytes=16 * 4096)
    large, small = pager.zeros(100, 100), pager.zeros(80, 80)
    with large.resident(), pytest.raises(OutOfFrames, match="24 KiB of 64 KiB are not pinned"):
        small + 1
    assert (small + 1).sum().item() == 6400


def test_tensors_of_two_pagers_are_refused(make_pager):
    one, other = make_pager(), make_pager()
    with pytest.raises(ForeignTensor, match="two pagers"):
        one.zeros(3) + other.zeros(3)
    with pytest.raises(ForeignTensor):
        one.zeros(3).copy_(other.zeros(3))
    assert torch.equal(one.tensor(other.tensor(torch.arange(3))), torch.arange(3))


def test_tensor_on_another_device_gets_pytorch_s_own_error(pager):
    with pytest.raises((RuntimeError, NotImplementedError)):
        pager.zeros(3) + torch.ones(3, device="meta")


@pytest.mark.parametrize("name", ["set_", "_pin_memory"])
def test_operator_that_cannot_be_paged_is_refused_by_name(pager, name):
    paged = pager.tensor(torch.ones(3))
    calls = {
        "set_": lambda: torch.ones(3).set_(paged),
        "_pin_memory": lambda: torch.ops.aten._pin_memory(paged),
    }
    with pytest.raises(UnsupportedOperator, match=name):
        calls[name]()
    assert paged.sum().item() == 3


def test_sparse_result_that_would_keep_an_alias_is_refused_by_name(pager):
    values = pager.tensor(torch.ones(3))
    with pytest.raises(UnsupportedOperator, match="sparse"):
        torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), values, (3,))
    assert torch.equal(values.to_sparse().to_dense(), torch.ones(3))


ADDRESSES = {
    "data_ptr": lambda t: t.data_ptr(),
    "untyped_storage": lambda t: t.untyped_storage().data_ptr(),
    "storage": lambda t: t.storage(),
    "dlpack": lambda t: t.__dlpack__(),
    "torch.from_dlpack": lambda t: torch.from_dlpack(t),
    "numpy": lambda t: t.numpy(),
    "share_memory_": lambda t: t.share_memory_(),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_what_needs_an_address_is_refused_by_name_with_the_remedy(pager, name):
    paged = pager.tensor(torch.ones(3))
    with pytest.raises(UnsupportedOperator, match=r"resident\(\)|arrives as a plain one"):
        ADDRESSES[name](paged)


def test_address_taken_in_c_is_an_error_and_never_zero(pager):
    for tensor in (pager.tensor(torch.ones(3)), pager.zeros(4, 4).t()[1:]):
        with pytest.raises(RuntimeError):
            torch._C.TensorBase.data_ptr(tensor)
        with pytest.raises(RuntimeError):
            torch.utils.dlpack.to_dlpack(tensor)


# Factories.

FACTORIES = {
    "zeros_like": lambda t: torch.zeros_like(t),
    "ones_like": lambda t: torch.ones_like(t),
    "full_like": lambda t: torch.full_like(t, 2.5),
    "full_like_dtype": lambda t: torch.full_like(t, 2, dtype=torch.int64),
    "rand_like": lambda t: torch.rand_like(t),
    "randn_like": lambda t: torch.randn_like(t, dtype=torch.float64),
    "randint_like": lambda t: torch.randint_like(t, 3, 90),
    "randint_like_high": lambda t: torch.randint_like(t, 90),
    "new_zeros": lambda t: t.new_zeros(3, 7),
    "new_ones": lambda t: t.new_ones((3, 7), dtype=torch.int32),
    "new_full": lambda t: t.new_full((2, 2), 9),
    "clone": lambda t: t.clone(),
    "clone_contiguous": lambda t: t.t().clone(memory_format=torch.contiguous_format),
    "contiguous": lambda t: t.t().contiguous(),
    "clone_expanded": lambda t: t[:1].expand(7, -1).clone(),
    "to_dtype": lambda t: t.to(torch.float16),
    "half": lambda t: t.half(),
    "to_copy": lambda t: t.to(torch.float32, copy=True),
    "clone_conj": lambda t: (
        torch.complex(t + 0, t + 1).conj().clone()
        if type(t) is torch.Tensor
        else t.new_zeros(1).to(torch.complex64).conj().clone()
    ),
    "clone_neg": lambda t: torch._neg_view(t).clone(),
    "new_empty_strided": lambda t: t.new_empty_strided((2, 3), (5, 1)).zero_(),
    "empty_like": lambda t: torch.empty_like(t).zero_(),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_after_a_paged_tensor_is_paged_and_equal(pager, name):
    plain = torch.randn(5, 9)
    paged = pager.tensor(plain)
    torch.manual_seed(4)
    one = FACTORIES[name](paged)
    torch.manual_seed(4)
    other = FACTORIES[name](plain)
    assert type(one) is PagedTensor
    if name == "clone_conj":
        assert not one.is_conj()
        return
    assert one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    assert one._region is not paged._region
    one.evict()
    assert torch.equal(one, other)


@pytest.mark.parametrize("factory", [torch.zeros_like, torch.ones_like, torch.clone])
def test_factory_after_an_empty_view_has_the_strides_of_a_plain_one(pager, factory):
    plain = torch.zeros(2, 0).t()
    assert factory(pager.tensor(torch.zeros(2, 0)).t()).stride() == factory(plain).stride()


def test_zeros_are_never_written(pager):
    paged = pager.tensor(torch.randn(5000))
    zeros = torch.zeros_like(paged)
    assert zeros.tier == "zero" and torch.zeros_like(zeros).clone().tier == "zero"
    assert torch._neg_view(zeros).clone().view(torch.int32).unique().tolist() == [-(2**31)]


def test_factory_for_another_device_or_layout_is_plain(pager):
    paged = pager.tensor(torch.randn(5))
    assert torch.zeros_like(paged, device="meta").is_meta
    assert type(torch.zeros_like(paged, layout=torch.sparse_coo)) is torch.Tensor
    assert paged.to("meta").is_meta and paged.to("cpu") is paged


# Lists.


def test_list_operator_runs_in_groups_that_fit_the_device(make_pager):
    pager = make_pager(device_bytes=16 * 4096)
    plain = [torch.randn(n) for n in (1000, 3000, 500, 2000, 4000, 10)]
    paged = [pager.tensor(t) for t in plain]
    other = [torch.randn_like(t) for t in plain]
    paged_other = [pager.tensor(t) for t in other]
    scalars = [0.5 * k for k in range(6)]
    for call in (
        lambda a, b: torch._foreach_add_(a, b, alpha=2),
        lambda a, b: torch._foreach_mul_(a, scalars),
        lambda a, b: torch._foreach_addcmul_(a, b, a, torch.tensor(scalars)),
        lambda a, b: torch._foreach_lerp_(a, b, 0.3),
        lambda a, b: torch._foreach_copy_(a, b),
        lambda a, b: torch._foreach_mul_(a, torch.tensor(3.0)),
    ):
        call(paged, paged_other)
        call(plain, other)
        assert all(torch.equal(one, two) for one, two in zip(paged, plain, strict=True))
    norms = torch._foreach_norm(paged)
    assert all(type(norm) is torch.Tensor for norm in norms)
    assert all(
        torch.equal(one, two) for one, two in zip(norms, torch._foreach_norm(plain), strict=True)
    )
    for call in (
        lambda a, b: torch._foreach_sqrt(a),
        lambda a, b: torch._foreach_add(a, b),
        lambda a, b: torch._foreach_sub(a, scalars),
        lambda a, b: torch._foreach_maximum(a, b),
        lambda a, b: torch._foreach_pow(2.0, a),
    ):
        results = call(paged, paged_other)
        assert all(type(result) is PagedTensor for result in results)
        for one, two in zip(results, call(plain, other), strict=True):
            assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(two))


def test_list_of_paged_and_plain_tensors(pager):
    plain = [torch.randn(300), torch.randn(4), torch.randn(0)]
    mixed = [pager.tensor(plain[0]), plain[1].clone(), pager.tensor(plain[2])]
    results = torch._foreach_add(mixed, 1)
    assert [type(result) for result in results] == [PagedTensor, torch.Tensor, PagedTensor]
    torch._foreach_add_(mixed, 1)
    torch._foreach_add_(plain, 1)
    for one, two, three in zip(mixed, plain, results, strict=True):
        assert torch.equal(one, two) and torch.equal(three, two)


def test_list_that_fits_only_when_halved_beside_a_pin(make_pager):
    pager = make_pager(device_bytes=16 * 4096)
    held = pager.zeros(13 * 1024)
    tensors = [pager.tensor(torch.ones(1024)) for _ in range(8)]
    with held.resident():
        torch._foreach_add_(tensors, 1)
    assert all(tensor.sum().item() == 2048 for tensor in tensors)


def test_list_of_different_lengths_gets_pytorch_s_own_error(pager):
    tensors = [pager.zeros(3), pager.zeros(3)]
    with pytest.raises(RuntimeError, match=r"same|number|length|size"):
        torch._foreach_add_(tensors, [torch.ones(3)])


def test_unscaling_finds_infinities_in_every_group(make_pager):
    pager = make_pager(device_bytes=16 * 4096)
    gradients = [pager.tensor(torch.full((3000,), 2.0)) for _ in range(6)]
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.5))
    assert found.item() == 0 and all(gradient.sum().item() == 3000 for gradient in gradients)
    gradients[4][17] = float("inf")
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.5))
    assert found.item() == 1
