# SPDX-License-Identifier: Apache-2.0
"""Making paged tensors, every dtype and size, residency, text."""

from __future__ import annotations

import warnings
import weakref

import numpy
import pytest
import torch

from pagert.errors import ConfigurationError, PagerClosed, UnsupportedTensor
from pagert.tensor import PagedTensor

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex32, torch.complex64,
    torch.complex128, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (33, 65)]


def random_bits(shape, dtype, seed=0):
    """Random bits as a tensor: NaN payloads, negative zeros and all."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    count = int(numpy.prod(shape)) * dtype.itemsize
    return (
        torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .reshape(shape)
    )


def raw(tensor):
    tensor = tensor.detach()
    return (
        torch.empty(tensor.shape, dtype=tensor.dtype)
        .copy_(tensor)
        .reshape(-1)
        .view(torch.uint8)
        .tolist()
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_size_comes_back_bit_for_bit(pager, dtype, shape):
    plain = random_bits(shape, dtype)
    paged = pager.tensor(plain)
    assert type(paged) is PagedTensor
    assert paged.shape == plain.shape and paged.dtype == dtype and paged.device.type == "cpu"
    for _ in range(2):
        paged.evict()
        assert raw(paged) == raw(plain)
    assert raw(paged.clone()) == raw(plain)
    other = torch.empty_like(paged)
    other.copy_(paged)
    other.evict()
    assert raw(other) == raw(plain)
    paged.zero_()
    assert raw(paged) == [0] * (plain.numel() * dtype.itemsize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conversion_gives_the_values_of_a_plain_conversion(pager, dtype):
    plain = torch.tensor([0.0, 1.0, 2.5, 100.0]).to(torch.float64)
    paged = pager.tensor(plain)
    if dtype is torch.complex32:
        warnings.simplefilter("ignore")
    assert raw(paged.to(dtype)) == raw(plain.to(dtype))
    assert type(paged.to(dtype)) is PagedTensor
    assert raw(pager.tensor(plain, dtype=dtype)) == raw(plain.to(dtype))


def test_tensor_never_shares_memory_with_its_source(pager):
    plain = torch.zeros(10)
    paged = pager.tensor(plain)
    plain.add_(1)
    assert paged.sum().item() == 0
    array = numpy.arange(6.0)
    assert torch.equal(pager.tensor(array), torch.as_tensor(array))
    assert torch.equal(pager.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]]))
    assert pager.tensor(3.5).item() == 3.5
    assert pager.tensor(True).dtype == torch.bool


def test_dense_layouts_are_kept_and_others_become_contiguous(pager):
    plain = torch.randn(2, 3, 4, 5)
    for source in (plain.permute(3, 1, 0, 2), plain.to(memory_format=torch.channels_last)):
        assert pager.tensor(source).stride() == source.stride()
        assert torch.equal(pager.tensor(source), source)
    for source in (plain[..., ::2], plain[:1].expand(6, 3, 4, 5), plain.as_strided((3, 3), (2, 1))):
        paged = pager.tensor(source)
        assert paged.is_contiguous() and torch.equal(paged, source)
    turned = torch.randn(3, 4, dtype=torch.complex64).conj()
    assert torch.equal(pager.tensor(turned), turned)


def test_empty_zeros_and_full(pager):
    assert pager.zeros(3, 4).tier == "zero" and pager.empty((3, 4)).shape == (3, 4)
    assert pager.zeros(5, dtype=torch.int64).tolist() == [0] * 5
    assert pager.zeros(()).item() == 0 and pager.zeros(0).tolist() == []
    assert pager.zeros(torch.Size([2, 2])).tolist() == [[0, 0], [0, 0]]
    full = pager.full((2, 2), 7)
    assert full.dtype == torch.full((), 7).dtype and full.tolist() == [[7, 7], [7, 7]]
    assert pager.full((2,), 1.5).dtype == torch.get_default_dtype()
    assert pager.full((2,), True).dtype == torch.bool
    assert pager.zeros(3, requires_grad=True).requires_grad


def test_tensor_larger_than_the_device_tier_can_be_made_copied_and_read_out(make_pager):
    pager = make_pager(device_bytes=16 * 4096)
    plain = torch.randn(100_000)
    paged = pager.tensor(plain)
    assert paged.tolist() == plain.tolist()
    copy = paged.clone()
    assert copy.cpu() is copy
    assert copy.tolist() == plain.tolist()
    assert paged.to(torch.float64).tolist() == plain.to(torch.float64).tolist()
    copy[:10].zero_()
    assert copy.tolist()[:11] == [0.0] * 10 + plain.tolist()[10:11]
    assert torch.equal(paged[99_990:], plain[99_990:])


UNSUPPORTED = {
    "sparse_coo": (lambda: torch.eye(3).to_sparse(), "layout sparse_coo"),
    "sparse_csr": (lambda: torch.eye(3).to_sparse_csr(), "layout sparse_csr"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "quantized",
    ),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "layout _mkldnn"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested",
    ),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "no shape"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_tensor_is_refused_by_name(pager, name):
    make, words = UNSUPPORTED[name]
    with pytest.raises(UnsupportedTensor, match=words):
        pager.tensor(make())
    assert pager.tensor(torch.ones(3)).sum().item() == 3


def test_closed_pager_refuses_by_name_and_keeps_its_text(pager):
    paged = pager.tensor(torch.ones(3))
    pager.close()
    with pytest.raises(PagerClosed):
        pager.tensor(torch.ones(3))
    with pytest.raises(PagerClosed):
        paged + 1
    with pytest.raises(PagerClosed):
        pager.page_(torch.nn.Linear(2, 2))
    assert "closed" in repr(paged) and paged.shape == (3,)


def test_negative_min_bytes_is_refused(pager):
    with pytest.raises(ConfigurationError, match="min_bytes=-1"):
        pager.page_(torch.nn.Linear(2, 2), min_bytes=-1)


# Residency.


def test_resident_lends_a_plain_tensor_and_keeps_what_is_written(pager):
    paged = pager.tensor(torch.arange(10.0))
    version = paged._version
    with paged[2:5].resident() as dense:
        assert type(dense) is torch.Tensor and dense.tolist() == [2, 3, 4]
        dense.mul_(2)
        assert paged.tier in ("device", "mixed")
        assert (paged + 1).tolist() == [1, 2, 5, 7, 9, 6, 7, 8, 9, 10]
    assert paged._version > version
    paged.evict()
    assert paged.tolist() == [0, 1, 4, 6, 8, 5, 6, 7, 8, 9]


def test_what_was_lent_is_empty_afterwards(pager):
    paged = pager.tensor(torch.arange(10.0))
    with paged.resident() as dense:
        pass
    assert dense.numel() == 0


def test_resident_read_leaves_the_pages_clean_and_the_version_alone(pager):
    paged = pager.tensor(torch.arange(10.0), requires_grad=True)
    version = paged._version
    with paged.resident("read") as dense:
        assert dense.sum().item() == 45
    assert paged._version == version
    with pytest.raises(ValueError, match="'update' and 'read'"):
        paged.resident("write")


def test_view_that_outlives_its_resident_context_is_reported(pager):
    paged = pager.tensor(torch.arange(10.0))
    with (
        pytest.warns(RuntimeWarning, match="still alive after the context"),
        paged.resident() as dense,
    ):
        view = dense[2:]
    del view
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with paged.resident() as dense:
            total = dense[2:].sum()
    assert total.item() == 44


def test_resident_lets_go_after_an_exception_and_opens_once(pager):
    paged = pager.tensor(torch.arange(10.0))
    context = paged.resident()
    with context, pytest.raises(RuntimeError, match="open already"):
        context.__enter__()
    with pytest.raises(RuntimeError, match="in the middle"), paged.resident():
        raise RuntimeError("in the middle")
    assert paged.sum().item() == 45


def test_resident_of_nothing_and_of_a_number(pager):
    with pager.zeros(0, 3).resident() as dense:
        assert dense.shape == (0, 3)
    with pager.tensor(2.0).resident() as dense:
        dense.add_(1)
        assert dense.shape == ()


def test_prefetch_evict_and_tier(pager):
    paged = pager.tensor(torch.ones(5000))
    paged.prefetch()
    paged.evict()
    assert paged.tier in ("host", "flash")
    half = pager.zeros(4096)
    half[:1024].fill_(1)
    assert half.tier == "mixed" and half[2048:].tier == "zero"
    nothing = pager.zeros(0)
    nothing.prefetch()
    nothing.evict()
    assert nothing.tier == "zero"


# Text.


@pytest.mark.parametrize(
    "write", [repr, str, "{}".format, lambda t: f"{t!r}"], ids=["repr", "str", "format", "f"]
)
def test_text_shows_shape_dtype_and_tier_and_moves_nothing(pager, write):
    paged = pager.tensor(torch.ones(3, 4, dtype=torch.bfloat16))
    before = (getattr(pager.pump, "pins", 0), pager.stats())
    text = write(paged)
    assert (getattr(pager.pump, "pins", 0), pager.stats()) == before
    assert "(3, 4)" in text and "torch.bfloat16" in text and f"tier={paged.tier}" in text


def test_text_of_parameters_and_modules(pager):
    module = pager.page_(
        torch.nn.ParameterList([torch.nn.Parameter(torch.ones(40, 40))]), min_bytes=0
    )
    assert repr(module[0]).startswith("Parameter containing:\nPagedTensor(shape=(40, 40)")
    assert "requires_grad=True" in repr(module[0])
    assert "40x40" in repr(module)
    assert "grad_fn=<" in repr(module[0].view(-1))
    assert "Linear(in_features=2" in repr(pager.page_(torch.nn.Linear(2, 3), min_bytes=0))


def test_format_of_a_number_is_the_number(pager):
    assert f"{pager.tensor(1.25):.1f}" == f"{torch.tensor(1.25):.1f}"
    with pytest.raises(TypeError):
        format(pager.zeros(3), ".1f")


# Python objects.


def test_paged_tensor_is_an_ordinary_python_object(pager):
    paged = pager.tensor(torch.ones(3))
    reference = weakref.ref(paged)
    assert hash(paged) == hash(paged) and paged in {paged}
    assert {paged: 1}[paged] == 1
    paged.note = "kept"
    assert reference().note == "kept"
    del paged
    assert reference() is None


def test_conversions_to_python(pager):
    paged = pager.tensor([[1.5, 2.0], [0.0, -1.0]])
    assert paged.tolist() == [[1.5, 2.0], [0.0, -1.0]]
    assert paged[0, 0].item() == 1.5 and float(paged[0, 1]) == 2.0 and int(paged[1, 1]) == -1
    assert bool(paged[0, 0]) and not bool(paged[1, 0])
    assert 2.0 in paged and len(paged) == 2
    assert [row.tolist() for row in paged] == paged.tolist()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(paged)
    assert [10, 20, 30][pager.tensor(1)] == 20


def test_indexing_and_assignment_work_as_for_plain_tensors(pager):
    plain = torch.arange(24.0).view(4, 6)
    paged = pager.tensor(plain)
    mask = plain > 10
    rows = torch.tensor([2, 0])
    assert torch.equal(paged[mask], plain[mask]) and torch.equal(paged[rows, 1:3], plain[rows, 1:3])
    assert torch.equal(paged[pager.tensor(mask)], plain[mask])
    for target in (paged, plain):
        target[1] = 5
        target[mask] = -1
        target[rows, 0] = torch.tensor([7.0, 8.0])
        target[:, 3] = target[:, 2]
        target[0, 0] += 100
    assert torch.equal(paged, plain)


def test_tensors_are_freed_without_the_garbage_collector(pager):
    import gc

    if not hasattr(pager.pump, "live_regions"):
        pytest.skip("counts the regions of the fake runtime")
    gc.disable()
    try:
        for _ in range(5):
            weight = pager.tensor(torch.ones(50, 50), requires_grad=True)
            (weight.t() @ weight).sum().backward()
            with weight.resident():
                pass
            module = pager.page_(torch.nn.Linear(50, 50), min_bytes=0)
            module(torch.ones(2, 50)).sum().backward()
            del module, weight
        assert pager.pump.live_regions == 0
    finally:
        gc.enable()
