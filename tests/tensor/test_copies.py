# SPDX-License-Identifier: Apache-2.0
"""Copies, files, other processes, and rebinding:

what leaves pages leaves right, and dtype changes are real.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import numpy
import pytest
import torch

from pagert.errors import PagerClosed, UnsupportedOperator, UnsupportedTensor
from pagert.tensor import PagedTensor


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


# deepcopy and copy.


def test_deepcopy_is_independent_and_keeps_what_a_parameter_is(pager):
    weight = torch.nn.Parameter(pager.tensor(torch.randn(40, 40)))
    weight.tags = ["kept"]
    twin = copy.deepcopy(weight)
    assert type(twin) is PagedTensor and isinstance(twin, torch.nn.Parameter) and twin.requires_grad
    assert twin.tags == ["kept"] and twin.tags is not weight.tags
    before = torch.clone(weight.detach().cpu() + 0)
    with torch.no_grad():
        twin.add_(1)
    weight.evict()
    assert torch.equal(weight, before) and torch.equal(twin, before + 1)


def test_deepcopy_keeps_ties_through_one_storage_and_through_one_object(pager):
    base = pager.tensor(torch.arange(24.0))
    pair = {
        "base": base,
        "view": base.view(4, 6)[1:3],
        "again": base,
        "transposed": base.view(4, 6).t(),
    }
    twin = copy.deepcopy(pair)
    assert twin["again"] is twin["base"] and twin["view"]._region is twin["base"]._region
    assert twin["transposed"].stride() == (1, 6) and twin["view"].storage_offset() == 6
    twin["base"].zero_()
    assert twin["view"].abs().sum().item() == 0 and base.sum().item() == 276


def test_deepcopy_of_a_tensor_larger_than_the_device(make_pager):
    pager = make_pager(device_bytes=16 * 4096)
    plain = torch.randn(50_000)
    assert copy.deepcopy(pager.tensor(plain)).tolist() == plain.tolist()


def test_deepcopy_of_nothing_of_zeros_and_of_gradients(pager):
    assert copy.deepcopy(pager.zeros(0, 3)).shape == (0, 3)
    assert copy.deepcopy(pager.zeros(5000)).tier == "zero"
    leaf = pager.tensor(torch.ones(3), requires_grad=True)
    (leaf * 2).sum().backward()
    assert torch.equal(copy.deepcopy(leaf).grad, leaf.grad)
    assert copy.deepcopy(leaf).grad._region is not leaf.grad._region
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(leaf.view(-1))


def test_deepcopied_module_trains_apart_from_its_original(pager):
    torch.manual_seed(0)
    model = pager.page_(
        torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30)), min_bytes=0
    )
    teacher = copy.deepcopy(model)
    assert all(type(p) is PagedTensor for p in (*teacher.parameters(), *teacher.buffers()))
    before = [torch.clone(p.detach() + 0) for p in teacher.parameters()]
    teacher(torch.randn(8, 30)).sum().backward()
    assert all(type(p.grad) is PagedTensor for p in teacher.parameters())
    assert all(p.grad is None for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert all(torch.equal(p, q) for p, q in zip(teacher.parameters(), before, strict=True))


def test_copy_shares_the_bytes(pager):
    weight = torch.nn.Parameter(pager.tensor(torch.zeros(3)))
    weight.note = 1
    twin = copy.copy(weight)
    assert twin is not weight and isinstance(twin, torch.nn.Parameter) and twin.note == 1
    with torch.no_grad():
        twin.add_(1)
    assert weight.sum().item() == 3


# Files and processes.


def test_saved_tensors_are_plain_and_load_with_weights_only(pager):
    plain = torch.randn(6, 7).to(torch.bfloat16)
    paged = pager.tensor(plain)
    for value, expected in (
        (paged, plain),
        (paged.t(), plain.t()),
        (paged[2:, ::2], plain[2:, ::2]),
    ):
        loaded = saved(value)
        assert (
            type(loaded) is torch.Tensor
            and loaded.dtype == torch.bfloat16
            and torch.equal(loaded, expected)
        )
    assert saved(pager.zeros(0, 3)).shape == (0, 3)
    assert saved(pager.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]


def test_saved_slice_writes_only_its_own_bytes(pager):
    paged = pager.tensor(torch.zeros(100_000))
    stream = io.BytesIO()
    torch.save(paged[10:20], stream)
    assert stream.tell() < 4000


def test_saved_parameter_is_a_plain_parameter_and_ties_stay(pager):
    weight = torch.nn.Parameter(pager.tensor(torch.randn(3, 3)), requires_grad=False)
    loaded = saved({"one": weight, "two": weight})
    assert loaded["one"] is loaded["two"] or loaded["one"].data_ptr() == loaded["two"].data_ptr()
    assert type(loaded["one"]) is torch.nn.Parameter and loaded["one"].requires_grad is False
    assert torch.equal(loaded["one"], weight)


def test_state_dict_travels_between_paged_and_plain_modules(pager):

    def make():
        return torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.BatchNorm1d(20))

    plain, paged = make(), pager.page_(make(), min_bytes=0)
    weight = paged[0].weight
    paged.load_state_dict(plain.state_dict())
    assert paged[0].weight is weight and type(weight) is PagedTensor
    assert all(
        torch.equal(a, b)
        for a, b in zip(paged.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    with torch.no_grad():
        weight.add_(1)
    loaded = saved(paged.state_dict())
    assert all(type(value) is torch.Tensor for value in loaded.values())
    plain.load_state_dict(loaded)
    assert torch.equal(plain[0].weight, weight)
    plain.load_state_dict(paged.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        paged.load_state_dict({**loaded, "0.weight": torch.ones(3, 3)})
    assert torch.equal(plain[0].weight, weight)


def test_pickle_and_processes_get_a_plain_tensor(pager):
    plain = torch.arange(7)
    paged = pager.tensor(plain)
    assert torch.equal(pickle.loads(pickle.dumps(paged)), plain)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(paged)
    received = queue.get()
    assert (
        type(received) is torch.Tensor
        and received.dtype == torch.int64
        and torch.equal(received, plain)
    )


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_data_loader_of_paged_items_gives_plain_batches_of_the_same_dtype(pager):
    for dtype in (torch.int64, torch.bfloat16):
        plain = [torch.arange(3).to(dtype) + k for k in range(4)]
        for batch, start in zip(
            torch.utils.data.DataLoader(Items([pager.tensor(t) for t in plain]), batch_size=2),
            (0, 2),
            strict=True,
        ):
            assert batch.dtype == dtype and torch.equal(
                batch, torch.stack(plain[start : start + 2])
            )


def test_paged_items_in_a_worker_process_arrive_right_or_are_refused_by_name(pager):
    plain = [torch.arange(3) + k for k in range(4)]
    items = Items([pager.tensor(t) for t in plain])
    with pytest.raises(UnsupportedOperator, match=r"resident\(\)"):
        list(torch.utils.data.DataLoader(items, batch_size=2, num_workers=1))
    loader = torch.utils.data.DataLoader(items, batch_size=None, num_workers=1, timeout=60)
    if hasattr(pager.pump, "recorded"):  # the fake runtime's pages are in the worker too
        received = list(loader)
        assert all(
            type(a) is torch.Tensor and torch.equal(a, b)
            for a, b in zip(received, plain, strict=True)
        )
    else:
        with pytest.raises(PagerClosed, match="sent through a queue"):
            list(loader)


def test_numpy_gets_a_copy(pager):
    paged = pager.tensor([[1, 2], [3, 4]])
    array = numpy.asarray(paged)
    assert array.tolist() == [[1, 2], [3, 4]] and array.dtype == numpy.int64
    array[0, 0] = 9
    assert paged[0, 0].item() == 1
    assert numpy.array(paged, dtype=numpy.float32).dtype == numpy.float32
    assert paged.numpy(force=True).tolist() == [[1, 2], [3, 4]]
    assert numpy.add(paged, 1).tolist() == [[2, 3], [4, 5]]
    with pytest.raises(ValueError, match="copy"):
        numpy.asarray(paged, copy=False)
    with pytest.raises(RuntimeError, match="detach"):
        numpy.asarray(pager.zeros(3, requires_grad=True))


def test_torch_tensor_and_as_tensor_of_a_paged_tensor(pager):
    paged = pager.tensor([1.0, 2.0])
    assert torch.as_tensor(paged) is paged
    with pytest.warns(UserWarning, match="copy construct"):
        assert torch.tensor(paged).tolist() == [1, 2]
    assert torch.asarray(paged).tolist() == [1, 2]
    assert torch.stack([paged, torch.ones(2)]).tolist() == [[1, 2], [1, 1]]


# Rebinding.


@pytest.mark.parametrize("paged_source", [False, True])
def test_assigning_data_rebinds_for_real(pager, paged_source):
    weight = torch.nn.Parameter(pager.tensor(torch.ones(3, 3)))
    view, version = weight.detach(), weight._version
    source = torch.arange(8.0).to(torch.bfloat16)
    weight.data = pager.tensor(source) if paged_source else source
    assert weight.shape == (8,) and weight.dtype == torch.bfloat16 and weight.requires_grad
    assert isinstance(weight, torch.nn.Parameter) and weight._version == version
    weight.evict()
    assert torch.equal(weight, source) and view.sum().item() == 9
    (weight * 2).sum().backward()
    assert weight.grad.dtype == torch.bfloat16 and type(weight.grad) is PagedTensor


def test_assigning_data_frees_the_old_pages(pager):
    if not hasattr(pager.pump, "live_regions"):
        pytest.skip("counts the regions of the fake runtime")
    weight = pager.tensor(torch.ones(3, 3))
    weight.data = torch.zeros(5)
    assert pager.pump.live_regions == 1


def test_writing_through_data_reaches_the_pages_and_not_the_version(pager):
    weight = torch.nn.Parameter(pager.tensor(torch.ones(3)))
    version = weight._version
    weight.data.copy_(torch.full((3,), 5.0))
    weight.data[1] = 7
    weight.evict()
    assert weight.tolist() == [5, 7, 5] and weight._version == version
    weight.data.normal_()


def test_bad_data_is_refused(pager):
    weight = torch.nn.Parameter(pager.tensor(torch.ones(3)))
    with pytest.raises(UnsupportedTensor, match="sparse"):
        weight.data = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match="must be a tensor"):
        weight.data = [1, 2]
    with pytest.raises(RuntimeError, match="floating point"):
        weight.data = torch.ones(3, dtype=torch.int64)
    assert weight.tolist() == [1, 1, 1]


def test_gradient_assignment_takes_plain_and_paged(pager):
    weight = torch.nn.Parameter(pager.tensor(torch.ones(3)))
    weight.grad = torch.ones(3)
    weight.grad = pager.zeros(3)
    assert type(weight.grad) is PagedTensor
    with pytest.raises(RuntimeError, match=r"size|type"):
        weight.grad = torch.ones(4)
    plain = torch.nn.Parameter(torch.ones(3))
    plain.grad = pager.tensor(torch.ones(3))
    torch.optim.SGD([plain], lr=1).step()
    assert plain.tolist() == [0, 0, 0]


CONVERSIONS = {
    "to": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "cpu": lambda m: m.cpu(),
    "to_device_and_dtype": lambda m: m.to("cpu", torch.float64),
    "float": lambda m: m.float(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_converted_module_has_converted_bytes_and_the_same_parameters(pager, name):
    torch.manual_seed(0)

    def make():
        return torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30))

    plain = make()
    paged = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(paged.parameters(), lr=0.5)
    pager.page_(paged, min_bytes=0)
    regions = getattr(pager.pump, "live_regions", None)
    parameters = list(paged.parameters())
    references = [weakref.ref(p) for p in parameters]
    for model in (paged, plain):
        model(torch.ones(8, 30)).sum().backward()
        CONVERSIONS[name](model)
    for one, other in zip(paged.parameters(), plain.parameters(), strict=True):
        assert type(one.grad) is PagedTensor and torch.equal(one.grad, other.grad)
        assert one.grad.dtype == one.dtype
        one.grad = other.grad = None
    for one, other in zip(
        (*paged.parameters(), *paged.buffers()),
        (*plain.parameters(), *plain.buffers()),
        strict=True,
    ):
        assert type(one) is PagedTensor and one.dtype == other.dtype
        one.evict()
        assert torch.equal(one, other)
    assert regions == getattr(pager.pump, "live_regions", None)
    assert all(
        a is b and r() is a
        for a, b, r in zip(paged.parameters(), parameters, references, strict=True)
    )
    assert optimizer.param_groups[0]["params"][0] is paged[0].weight
    x = torch.randn(8, 30).to(plain[0].weight.dtype)
    for model in (paged, plain):
        model(x).square().sum().backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert all(
        torch.equal(a, b) for a, b in zip(paged.parameters(), plain.parameters(), strict=True)
    )


def test_to_empty_gives_paged_tensors(pager):
    module = pager.page_(torch.nn.Linear(30, 30), min_bytes=0).to_empty(device="cpu")
    assert type(module.weight) is PagedTensor and module.weight.shape == (30, 30)


def test_swap_tensors_exchanges_bytes(pager):
    one, other = pager.tensor(torch.zeros(3)), torch.ones(4)
    torch.utils.swap_tensors(one, other)
    assert type(one) is torch.Tensor and type(other) is PagedTensor
    assert one.tolist() == [1] * 4 and other.tolist() == [0] * 3
