# SPDX-License-Identifier: Apache-2.0
"""Operators on tensors larger than the device tier: the numbers of plain PyTorch, within the budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagers import FakePager
from torch.nn import functional

from pagert.errors import OutOfFrames
from pagert.tensor import PagedTensor

DEVICE_BYTES = 128 * 1024
ROWS, WIDTH = 700, 150  # 410 KiB in float32: 3.2 times the device tier

both = pytest.mark.parametrize("make_pager", ["fake", "host-flash"], indirect=True)
real = pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)


@pytest.fixture
def pager(make_pager):
    pager = make_pager(device_bytes=DEVICE_BYTES)
    yield pager
    if not isinstance(pager, FakePager):
        assert pager.stats().device.peak_bytes <= DEVICE_BYTES


def draw(*size, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(-50, 50, size, generator=generator).to(dtype)


def plain(tensor):
    """A plain copy, by ranges, in the tensor's own layout."""
    if type(tensor) is not PagedTensor:
        return torch.as_tensor(tensor).detach()
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor.detach())


def as_bytes(tensor):
    return plain(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def leaves(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def check(pager, call, *operands, close=False):
    """Compare a call, its results and what it leaves in its operands, with plain PyTorch. Return the results."""
    paged = [pager.tensor(one) for one in operands]
    ours = [one.clone(memory_format=torch.preserve_format) for one in operands]
    torch.manual_seed(0)
    found = leaves(call(*paged))
    torch.manual_seed(0)
    expected = leaves(call(*ours))
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        one, other = plain(one), torch.as_tensor(other)
        assert one.shape == other.shape and one.dtype == other.dtype
        if close:
            check_close(one, other, leaves(call(*[operand.double() for operand in operands]))[index])
        else:
            assert as_bytes(one) == as_bytes(other)
    for one, other in zip(paged, ours, strict=True):
        assert as_bytes(one) == as_bytes(other)
    return found


def check_close(one, other, exact):
    """Compare with PyTorch's result, or the one in double precision where PyTorch's own rounding is too coarse."""
    try:
        torch.testing.assert_close(one, other)
    except AssertionError:
        torch.testing.assert_close(one, exact.to(one.dtype))


W, V = (ROWS, WIDTH), (ROWS, WIDTH)
INDEX = torch.tensor([[3, 699, 0, 3], [500, 501, 502, 3]])
TARGET = torch.arange(ROWS) % WIDTH
TARGET[7] = -100
CLASS_WEIGHT = torch.linspace(0.5, 2, WIDTH)

EXACT = {
    "add": lambda a, b: a + b,
    "type promotion": lambda a, b: a.to(torch.bfloat16) + b,
    "comparison": lambda a, b: a > b,
    "three operands": lambda a, b: torch.addcmul(a, b, a, value=0.5),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "pow": lambda a, b: a.abs() ** 1.3,
    "in place": lambda a, b: a.add_(b, alpha=2),
    "in place with itself": lambda a, b: a.mul_(a),
    "out": lambda a, b: torch.mul(a, b, out=b),
    "two results": lambda a, b: torch.frexp(a),
    "a plain operand": lambda a, b: a * draw(ROWS, WIDTH, seed=5),
    "a number": lambda a, b: 1 / a,
    "a scalar tensor": lambda a, b: a.mul_(torch.tensor(2.5)),
    "a row": lambda a, b: a * torch.linspace(0, 1, WIDTH),
    "a column": lambda a, b: a * torch.linspace(0, 1, ROWS)[:, None],
    "two layouts": lambda a, b: a + b.reshape(WIDTH, ROWS).t(),
    "transposed": lambda a, b: a.t().exp(),
    "some columns": lambda a, b: a[:, 3:77].mul_(2),
    "every third row": lambda a, b: a[::3].neg_(),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 1, 7),
    "fill_": lambda a, b: a.fill_(3),
    "zero_": lambda a, b: a.zero_(),
    "full_like": lambda a, b: torch.full_like(a, 2.5),
    "uniform_": lambda a, b: a.uniform_(),
    "normal_": lambda a, b: a.normal_(),
    "contiguous": lambda a, b: a.t().contiguous(),
    "copy of a row": lambda a, b: a.copy_(torch.linspace(0, 1, WIDTH)),
    "copy between layouts": lambda a, b: a.copy_(b.reshape(WIDTH, ROWS).t()),
    "a list": lambda a, b: torch._foreach_add([a, b], [b, a]),
    "a list in place": lambda a, b: torch._foreach_addcdiv_([a], [b], [b.abs() + 1], value=0.1),
    "cat": lambda a, b: torch.cat([a, b], 1),
    "flip": lambda a, b: a.flip(0, 1),
    "equal": lambda a, b: [torch.equal(a, a + 0), torch.equal(a, b)],
    "rows' sum": lambda a, b: a.sum(1),
    "rows' mean": lambda a, b: a.mean(-1, keepdim=True),
    "rows' norm": lambda a, b: torch.linalg.vector_norm(a, dim=1),
    "rows' std": lambda a, b: a.std(1),
    "rows' median": lambda a, b: a.median(1),
    "columns' std": lambda a, b: a.std(0),
    "amax": lambda a, b: [a.amax(), a.amax(0), a.amin(1), a.max(), a.min()],
    "max": lambda a, b: [*a.max(0), *a.min(1)],
    "max with NaN": lambda a, b: [(a / (a > -2)).max(0)[1], (a / (a > -2)).argmax()],
    "argmax": lambda a, b: [a.argmax(), a.argmin(0), a.argmax(1, keepdim=True)],
    "any, all": lambda a, b: [(a > 3).any(), (a > 3).all(1), (a > 3).any(0)],
    "count_nonzero": lambda a, b: (a > 0).count_nonzero(),
    "integers' sum": lambda a, b: (a * 100).to(torch.int64).sum(0),
    "softmax": lambda a, b: a.softmax(1),
    "cumsum": lambda a, b: [a.cumsum(1), a.cumsum(0)],
    "sort": lambda a, b: a.sort(1),
    "topk": lambda a, b: a.topk(5),
    "layer_norm": lambda a, b: functional.layer_norm(a, (WIDTH,), torch.linspace(0, 1, WIDTH), b[0]),
    "rms_norm": lambda a, b: functional.rms_norm(a, (WIDTH,)),
    "cross_entropy": lambda a, b: functional.cross_entropy(a, TARGET),
    "cross_entropy of each": lambda a, b: functional.cross_entropy(a, TARGET, weight=CLASS_WEIGHT, reduction="none"),
    "mm": lambda a, b: draw(20, WIDTH) @ a.t(),
    "mm of rows": lambda a, b: a @ draw(WIDTH, 64),
    "mm of two": lambda a, b: a @ b.t()[:, :200],
    "linear": lambda a, b: functional.linear(draw(4, 5, WIDTH), a, torch.linspace(0, 1, ROWS)),
    "bmm": lambda a, b: torch.bmm(a.view(10, 70, WIDTH), b.view(10, WIDTH, 70)),
    "mv": lambda a, b: a @ draw(WIDTH),
    "embedding": lambda a, b: functional.embedding(INDEX, a, padding_idx=3),
    "embedding with max_norm": lambda a, b: functional.embedding(INDEX, a, max_norm=1.0),
    "rows by index": lambda a, b: [a[INDEX], a[-INDEX], a.index_select(0, INDEX[0])],
    "elements by index": lambda a, b: [a.gather(1, TARGET[:, None].clamp(min=0)), a.take(INDEX * 7)],
    "index_add_": lambda a, b: a.index_add_(0, INDEX[0], draw(4, WIDTH)),
    "index_put_": lambda a, b: a.index_put_((INDEX[0],), draw(4, WIDTH), accumulate=True),
    "assignment to rows": lambda a, b: [a.__setitem__(INDEX[0], 1.5), a][1],
    "by a mask": lambda a, b: [a[b > 1], a[b[:, 0] > 0]],
    "assignment by a mask": lambda a, b: [a.__setitem__(b > 1, 1.5), a][1],
    "scatter_add_": lambda a, b: a.scatter_add_(1, INDEX[:, :2] % WIDTH, b[:2, :2] + 0),
    "scatter_": lambda a, b: a.scatter_(0, INDEX, 4.0),
    "one element": lambda a, b: a[3, 4].item(),
}

# The blocks' results are added up, or a block is too narrow for the kernel's vectors: another order of summation.
CLOSE = {
    "sum": lambda a, b: [a.sum(), a.sum(0), a.t().sum(1)],
    "mean": lambda a, b: [a.mean(), a.mean(0), a.to(torch.bfloat16).mean(0)],
    "norm": lambda a, b: [torch.linalg.vector_norm(a, 3, 0), a.norm(1, 0), a.norm(dim=0)],
    "prod": lambda a, b: (1 + a / 1000).prod(0),
    "softmax of columns": lambda a, b: a.softmax(0),
    "logsumexp": lambda a, b: a.logsumexp(0),
    "nansum": lambda a, b: (a / (a > 0)).nan_to_num(posinf=float("nan")).nansum(),
    "cross_entropy with weights": lambda a, b: functional.cross_entropy(a, TARGET, weight=CLASS_WEIGHT.to(a.dtype)),
    "product over the long axis": lambda a, b: (draw(10, ROWS) / ROWS).to(a.dtype) @ a,
    "product with both long": lambda a, b: (a / ROWS).t() @ b,
    "products in half precision": lambda a, b: draw(10, ROWS, dtype=torch.bfloat16) / ROWS @ a.to(torch.bfloat16),
}


@both
@pytest.mark.parametrize("call", EXACT.values(), ids=EXACT)
def test_operators_larger_than_the_device_are_bitwise_the_same(pager, call):
    check(pager, call, draw(*W), draw(*V, seed=1))


@both
@pytest.mark.parametrize("call", CLOSE.values(), ids=CLOSE)
def test_operators_that_add_up_blocks_are_close(pager, call):
    check(pager, call, draw(*W), draw(*V, seed=1), close=True)


@both
def test_norm_of_all_is_close_to_the_exact_one(pager):
    # PyTorch's own adds up all squares in float32: it is farther off.
    operand = draw(*W)
    expected = operand.double().norm().float()
    torch.testing.assert_close(plain(pager.tensor(operand).norm()), expected)
    torch.testing.assert_close(plain(torch._foreach_norm([pager.tensor(operand)])[0]), expected)


@pytest.mark.parametrize("make_pager", ["fake"], indirect=True)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_dtype_and_layout_of_elementwise_operators(make_pager, data):
    pager = make_pager(device_bytes=64 * 1024)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8]))
    size = data.draw(st.permutations([data.draw(st.integers(60, 90)), data.draw(st.integers(20, 40)), 17 * 2]))
    order = data.draw(st.permutations(range(3)))
    layout = [order.index(axis) for axis in range(3)]
    one = draw(*[size[axis] for axis in order], dtype=dtype).permute(layout)
    other_type = data.draw(st.sampled_from([dtype, torch.float32]))
    broadcast = data.draw(st.sampled_from([(), (1,), (size[2],), (size[1], 1), (1, size[1], size[2]), size]))
    other = draw(*broadcast, seed=1, dtype=other_type)
    start = data.draw(st.integers(0, 3))
    call = data.draw(
        st.sampled_from(
            [
                lambda a: a[start:] + other[start:] if other.dim() == 3 and len(other) > 1 else a[start:] + other,
                lambda a: a.mul_(2),
                lambda a: a[:, start:].clamp_(-1, 1),
                lambda a: torch.maximum(a, torch.tensor(3, dtype=a.dtype)),
                lambda a: (a == other).any(2),
                lambda a: a.contiguous(),
            ]
        )
    )
    check(pager, call, one)


# What is fetched.


def fetched_pages(pager, call):
    """Pages that a call brings to the device, of a pager whose device was empty."""
    before = pager.stats().faults
    call()
    return pager.stats().faults - before


@pytest.fixture
def table(make_pager):
    """A table whose rows take a page each, none of it on the device."""
    pager = make_pager(device_bytes=DEVICE_BYTES)
    table = pager.tensor(draw(200, 1024))
    table.evict()
    return pager, table


@real
@pytest.mark.parametrize(
    ("call", "page_count"),
    [
        (lambda t: functional.embedding(torch.tensor([[5, 7, 150], [5, 5, 199]]), t), 4),
        (lambda t: t[torch.tensor([1, 9])], 2),
        (lambda t: t.index_select(0, torch.tensor([3, 190])), 2),
        (lambda t: t.gather(1, torch.tensor([[3], [5], [9]])), 3),
        (lambda t: t.take(torch.tensor([1, 2, 1024 * 100])), 2),
        (lambda t: t[10:13].sum(), 3),
        (lambda t: t[42] + 1, 1),
        (lambda t: t.index_fill_(0, torch.tensor([8]), 1.0), 1),
        (lambda t: functional.embedding(torch.tensor([5, 7]), t, max_norm=1.0), 2),
    ],
)
def test_rows_that_are_looked_up_fault_their_pages_and_no_others(table, call, page_count):
    pager, table = table
    assert fetched_pages(pager, lambda: call(table)) == page_count


@both
def test_table_that_fits_and_of_which_most_is_needed_comes_as_a_whole(make_pager):
    pager = make_pager(device_bytes=DEVICE_BYTES)
    operand = draw(20, 1024)
    table = pager.tensor(operand)
    index = torch.arange(19)
    assert torch.equal(functional.embedding(index, table), operand[:19])
    assert torch.equal(table[index], operand[:19])


# Results and gradients.


@both
def test_large_results_are_paged_and_small_ones_plain(pager):
    large = pager.tensor(draw(*W))
    for result in (large + 1, large.softmax(1), draw(100, WIDTH) @ large.t(), large.t().contiguous()):
        assert type(result) is PagedTensor
    for result in (large.sum(), large.sum(1), draw(2, WIDTH) @ large.t(), large[INDEX]):
        assert type(result) is torch.Tensor


GRADIENTS = {
    "embedding": lambda w: functional.embedding(INDEX, w, padding_idx=500).pow(2).sum(),
    "embedding, by frequency": lambda w: functional.embedding(INDEX, w, scale_grad_by_freq=True).pow(2).sum(),
    "rows by index": lambda w: w[INDEX].pow(2).sum(),
    "index_select": lambda w: w.index_select(0, INDEX[0]).pow(2).sum(),
    "gather": lambda w: w.gather(1, INDEX % WIDTH).pow(2).sum(),
    "linear": lambda w: functional.linear(draw(3, 7, WIDTH), w).pow(2).mean(),
    "linear with a bias": lambda w: functional.linear(draw(7, WIDTH), w, torch.linspace(0, 1, ROWS)).tanh().mean(),
    "sum": lambda w: w.sum(),
    "mean of squares": lambda w: (w * w).mean(),
    "elementwise": lambda w: (w.exp() * 0.1).amax(1).sum(),
    "softmax": lambda w: w.softmax(1).pow(2).sum(),
    "cross_entropy": lambda w: functional.cross_entropy(w, TARGET),
    "layer_norm": lambda w: functional.layer_norm(w, (WIDTH,)).pow(2).mean(),
    "rms_norm": lambda w: functional.rms_norm(w, (WIDTH,)).pow(2).mean(),
    "largest of each column": lambda w: w.max(0)[0].sum(),
    "used twice": lambda w: functional.linear(functional.embedding(INDEX, w), w).pow(2).mean(),
}


@both
@pytest.mark.parametrize("call", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_what_is_larger_than_the_device(make_pager, call):
    pager = make_pager(device_bytes=DEVICE_BYTES)
    plain_one = draw(*W).requires_grad_()
    paged = pager.tensor(draw(*W), requires_grad=True)
    for _ in range(2):  # the second is accumulated
        call(plain_one).backward()
        call(paged).backward()
        assert type(paged.grad) is PagedTensor
        torch.testing.assert_close(plain(paged.grad), plain_one.grad)


@real
def test_gradient_of_a_lookup_lies_on_the_pages_of_its_rows_alone(table):
    _, table = table
    table.requires_grad_()
    functional.embedding(torch.tensor([5, 9, 150]), table).sum().backward()
    gradient = table.grad.detach()
    zero = [gradient[row].tier == "zero" for row in range(200)]
    assert [row for row in range(200) if not zero[row]] == [5, 9, 150]


@both
def test_gradients_that_are_part_of_a_graph_stay_in_it(pager):
    def second(w):
        loss = functional.embedding(INDEX, w).pow(3).sum() + functional.linear(draw(3, WIDTH), w).pow(3).mean()
        (first,) = torch.autograd.grad(loss, w, create_graph=True)
        return torch.autograd.grad(first[:4].pow(2).sum(), w)[0]

    paged = pager.tensor(draw(*W), requires_grad=True)
    torch.testing.assert_close(plain(second(paged)), second(draw(*W).requires_grad_()))


# Refusals.


@both
def test_what_cannot_be_streamed_says_so_with_sizes_budget_and_remedy(pager):
    large = pager.tensor(draw(*W))
    for call, name in (
        (lambda: torch.linalg.svd(large), "aten._linalg_svd"),
        (lambda: large.std(), "aten.std"),
        (lambda: large.reshape(-1).sort(), "aten.sort"),
        (lambda: large[1:].add_(large[:-1]), "aten.add_"),
    ):
        with pytest.raises(OutOfFrames) as caught:
            call()
        text = str(caught.value)
        for part in (name, "cannot run block by block", "float32, 4", "128 KiB", "raise device_bytes"):
            assert part in text, text


@both
def test_operands_that_fit_but_for_other_windows_are_not_streamed(pager):
    held, other = pager.tensor(draw(20 * 1024)), pager.tensor(draw(16 * 1024))
    with held.resident("read"), pytest.raises(OutOfFrames, match="are not pinned"):
        other.sum()
    assert plain(other.sum()) == draw(16 * 1024).sum()


@both
def test_index_that_is_out_of_range_is_refused_as_by_pytorch(pager):
    large = pager.tensor(draw(*W))
    for call in (
        lambda t: functional.embedding(torch.tensor([ROWS]), t),
        lambda t: t[torch.tensor([-ROWS - 1])],
        lambda t: t.index_select(0, torch.tensor([-1])),
        lambda t: t.gather(1, torch.tensor([[WIDTH]])),
        lambda t: functional.nll_loss(t, torch.full((ROWS,), WIDTH)),
    ):
        with pytest.raises((IndexError, RuntimeError)) as expected:
            call(draw(*W))
        with pytest.raises(expected.type):
            call(large)
