# SPDX-License-Identifier: Apache-2.0
"""Code that wants memory: it gets memory that stays, a copy, or a refusal by name; never a stale address."""

from __future__ import annotations

import copy
import gc
import io
import warnings

import numpy
import pytest
import torch
from pagers import open_pager
from stepping import plain, same

from pagert.errors import ForeignTensor, PagertError, UnsupportedOperator

VALUES = torch.arange(2048.0)

# What outlives its context: how it is made, and how it is written to.
EXPORTS = {
    "numpy": lambda dense: dense.numpy(),
    "numpy of detach": lambda dense: dense.detach().numpy(),
    "asarray": lambda dense: numpy.asarray(dense),
    "array of a view": lambda dense: dense[3:].numpy(),
    "memoryview": lambda dense: memoryview(dense.numpy()),
    "numpy.from_dlpack": lambda dense: numpy.from_dlpack(dense),
    "torch.from_dlpack": lambda dense: torch.from_dlpack(dense),
    "view": lambda dense: dense[3:],
    "parameter": lambda dense: torch.nn.Parameter(dense, requires_grad=False),
    "from_numpy": lambda dense: torch.from_numpy(dense.numpy()),
    "__dlpack__": lambda dense: dense.__dlpack__(),
    "to_dlpack": lambda dense: torch.utils.dlpack.to_dlpack(dense),
}


@pytest.fixture
def paged(pager):
    paged = pager.tensor(VALUES)
    paged.evict()
    return paged


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_that_outlives_its_context_keeps_the_pages_and_is_reported(pager, paged, name):
    with (
        pytest.warns(RuntimeWarning, match="still alive after the context.*stay pinned"),
        paged.resident() as dense,
    ):
        export = EXPORTS[name](dense)
    others = pager.tensor(torch.full((100_000,), -1.0))
    others[:50_000].add_(1)
    others[50_000:].add_(1)  # what is not pinned has left the device
    if name in ("__dlpack__", "to_dlpack"):
        export = torch.utils.dlpack.from_dlpack(export)
    assert export[5] in (5.0, 8.0)
    export[5] = 42.0
    assert 42.0 in plain(paged)
    del export
    paged.evict()
    assert 42.0 in plain(paged) and paged.sum() in (VALUES.sum() + 37, VALUES.sum() + 34)


def test_a_graph_that_outlives_its_context_has_the_values_it_was_made_of(paged):
    factor = torch.ones(2048, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="graph"), paged.resident("read") as dense:
        loss = (dense * factor).sum()
    assert dense.numel() == 0
    loss.backward()
    assert same(factor.grad, VALUES)
    del loss
    paged.evict()


COPIES = {
    "deepcopy": lambda dense: copy.deepcopy(dense),
    "clone": lambda dense: dense.clone(),
    "array": lambda dense: numpy.array(dense),
    "save": lambda dense: load(dense),
    "list": lambda dense: dense.tolist(),
}


def load(dense):
    file = io.BytesIO()
    torch.save(dense, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_made_in_a_context_is_no_export(paged, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with paged.resident() as dense:
            made = COPIES[name](dense)
    paged.fill_(-1)
    paged.evict()
    made = torch.as_tensor(made)
    assert type(made) is torch.Tensor and not made.__dict__ and same(made, VALUES)


def test_an_unused_export_does_not_keep_the_pages(paged):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with paged.resident() as dense:
            dense.__dlpack__()
            dense.numpy().sum()
            assert dense.data_ptr() and dense.untyped_storage().nbytes() == 8192
    paged.evict()


def test_a_pager_does_not_close_under_an_export():
    with open_pager("host", 1 << 20, 4096) as pager:
        paged = pager.tensor(VALUES)
        with pytest.warns(RuntimeWarning), paged.resident() as dense:
            array = dense.numpy()
        with pytest.raises(PagertError, match="holds tensors"):
            pager.close()
        assert array[7] == 7
        del array


def test_exports_make_no_cycles(pager, paged):
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with paged.resident() as dense:
                dense.numpy()
            del dense
        assert not any(isinstance(one, torch.Tensor) for one in gc.garbage)
        paged.evict()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.data_ptr(),
        lambda t: t[3:].data_ptr(),
        lambda t: t.detach().data_ptr(),
        lambda t: t.untyped_storage().data_ptr(),
        lambda t: t.storage().data_ptr(),
        lambda t: t.__dlpack__(),
        lambda t: torch.from_dlpack(t),
        lambda t: numpy.from_dlpack(t),
        lambda t: t.numpy(),
        lambda t: t.share_memory_(),
    ],
)
@pytest.mark.parametrize("evicted", [False, True])
def test_addresses_of_paged_tensors_are_refused_by_name_wherever_the_bytes_are(paged, ask, evicted):
    paged.evict() if evicted else paged.add_(0)
    with pytest.raises(UnsupportedOperator, match=r"of a paged tensor"):
        ask(paged)
    assert same(paged, VALUES)


@pytest.mark.parametrize("ask", [memoryview, lambda t: numpy.array(t, copy=False), bytearray])
def test_no_other_way_to_shared_memory(paged, ask):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        ask(paged)[0]


def test_arrays_made_of_paged_tensors_are_copies(paged):
    arrays = [numpy.asarray(paged), paged.numpy(force=True), numpy.array(paged)]
    paged.fill_(-1)
    paged.evict()
    assert all((array == VALUES.numpy()).all() for array in arrays)


TWO = {
    "add": lambda p, r: p + r,
    "in place": lambda p, r: p.add_(r),
    "copy_": lambda p, r: p.copy_(r),
    "matmul": lambda p, r: p @ r,
    "cat": lambda p, r: torch.cat([p, r]),
    "stack": lambda p, r: torch.stack([p, r]),
    "out": lambda p, r: torch.add(p, p, out=r),
    "where": lambda p, r: torch.where(p > 0, p, r),
    "foreach": lambda p, r: torch._foreach_add_([p, p.clone()], [r, r]),
    "foreach of lists": lambda p, r: torch._foreach_mul_([p, r], 2.0),
    "fused": lambda p, r: torch._fused_sgd_(
        [p], [r], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    ),
    "view as": lambda p, r: p.view_as(r).lerp_(r, 0.5),
    "linear": lambda p, r: torch.nn.functional.linear(torch.ones(40), p, r[0]),
    "index_put": lambda p, r: p.index_put_((torch.tensor([0]),), r[1]),
    "scatter": lambda p, r: p.scatter_(0, torch.zeros(40, 40, dtype=torch.int64), r),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO)
def test_tensors_of_two_pagers_in_one_operator_are_refused_by_name(make_pager, name):
    first, second = make_pager(), make_pager()
    values = torch.randn(2, 40, 40)
    p, r = first.tensor(values[0]), second.tensor(values[1])
    p.evict()
    r.evict()
    with pytest.raises(ForeignTensor, match=r"two pagers meet.*pager\.tensor"):
        TWO[name](p, r)
    p.evict()
    r.evict()
    assert same(p, values[0]) and same(r, values[1])


def test_sharing_a_shape_with_another_pagers_tensor_is_no_meeting(make_pager):
    first, second = make_pager(), make_pager()
    p, r = first.zeros(40, 40), second.zeros(1600)
    assert r.view_as(p).shape == p.shape and torch.zeros_like(p)._runtime is first
    assert same(first.tensor(r), r)
