# SPDX-License-Identifier: Apache-2.0
"""Cases of section A: a paged tensor is a tensor. Each test carries the id of its case."""

from __future__ import annotations

import copy
import ctypes
import io

import pytest
import torch
from stepping import same
from torch import nn
from torch.nn import functional

from pagert.errors import PagerClosed, UnsupportedOperator, UnsupportedTensor
from pagert.tensor import PagedTensor

pytestmark = pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)


def train(module, x, steps=3, make=torch.optim.AdamW):
    optimizer = make(module.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("look", [lambda p: p.view(-1), lambda p: p.t(), lambda p: p[3:], lambda p: p.detach()])
def test_a1_write_through_a_view_is_seen_by_base_and_views_after_eviction(pager, look):
    plain = torch.zeros(40, 40)
    paged = pager.tensor(plain)
    for tensor in (plain, paged):
        view, other = look(tensor), tensor.reshape(20, 80)
        version = tensor._version
        view[1:] += 1
        if tensor is paged:
            tensor.evict()
        assert tensor._version > version
        other[0] = 5
    assert same(paged, plain) and same(look(paged), look(plain))


def test_a1_backward_after_a_saved_weight_changed_through_a_view_is_refused(pager):
    weight = nn.Parameter(pager.tensor(torch.ones(40, 40)))
    loss = (torch.ones(2, 40, requires_grad=True) @ weight).square().sum()
    with torch.no_grad():
        weight.view(-1)[7] = 3
    weight.evict()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("evicted", [False, True])
def test_a2_views_are_paged_and_in_place_operators_return_the_same_object(pager, evicted):
    plain = torch.arange(1600.0).reshape(40, 40)
    paged = pager.tensor(plain)
    if evicted:
        paged.evict()
    assert paged.add_(1) is paged
    plain.add_(1)
    for look in (
        lambda t: t.t(),
        lambda t: t[2:4],
        lambda t: t.chunk(2)[1],
        lambda t: t.detach(),
        lambda t: t.unfold(0, 2, 3),
        lambda t: t.diagonal(),
    ):
        view = look(paged)
        assert type(view) is PagedTensor and view._region is paged._region
        if evicted:
            view.evict()
        assert same(view, look(plain)) and view.stride() == look(plain).stride()
    paged.evict()
    assert same(paged, plain)


CONVERSIONS = {
    "to": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "cpu": lambda m: m.cpu(),
    "type": lambda m: m.type(torch.float64),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a3_conversion_changes_bytes_and_keeps_parameters_and_optimizer(pager, name):
    modules = [nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    pager.page_(modules[1], min_bytes=0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    reserved = pager.stats().reserved_bytes
    for module, optimizer in zip(modules, optimizers, strict=True):
        CONVERSIONS[name](module)
        assert optimizer.param_groups[0]["params"][0] is module[0].weight
    assert pager.stats().reserved_bytes <= reserved * 2  # the old pages are not kept beside the new ones
    for tensor in modules[1].state_dict().values():
        tensor.evict()
    for one, other in zip(modules[1].state_dict().values(), modules[0].state_dict().values(), strict=True):
        assert type(one) is PagedTensor and same(one, other)
        assert torch.empty(one.shape, dtype=one.dtype).copy_(one).dtype == one.dtype
    before = modules[1][0].weight.detach().clone()
    for module, optimizer in zip(modules, optimizers, strict=True):
        dtype = module[0].weight.dtype
        module(torch.ones(4, 40, dtype=dtype)).mul(torch.arange(40, dtype=dtype)).sum().backward()
        module[0].weight.grad += 1
        optimizer.step()
    assert not same(modules[1][0].weight, before)
    assert same(modules[1][0].weight, modules[0][0].weight)


def test_a5_rebinding_data_works_whole_and_writes_through_data_reach_the_pages(pager):
    weight = nn.Parameter(pager.tensor(torch.ones(40, 40)))
    for other in (pager.tensor(torch.full((8,), 2.0)), torch.full((6,), 3.0, dtype=torch.float64)):
        weight.data = other
        weight.evict()
        assert same(weight, other) and weight.dtype == other.dtype and weight.requires_grad
        assert type(weight) is PagedTensor
    weight.data.copy_(torch.arange(6.0))
    weight.evict()
    assert weight.tolist() == list(range(6))
    weight.data.normal_(generator=torch.Generator().manual_seed(1))
    weight.evict()
    assert same(weight, torch.empty(6, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(1)))
    with pytest.raises(RuntimeError, match=r"dtype|type|size"):
        weight.grad = torch.ones(5, dtype=torch.float64)
    weight.grad = torch.ones(6, dtype=torch.float64)
    weight.grad.evict()
    assert weight.grad.sum().item() == 6
    with pytest.raises(UnsupportedTensor, match="sparse"):
        weight.data = torch.eye(3).to_sparse()


def test_a5_plain_tensor_that_is_given_paged_data_is_refused_to_its_reader(pager):
    plain = nn.Parameter(torch.ones(40, 40))
    plain.data = pager.tensor(torch.ones(40, 40))
    with pytest.raises(RuntimeError, match="annot access data pointer"):
        plain.sum()


def test_a6_deepcopy_of_a_model_in_all_tiers_keeps_what_it_is_and_is_apart(make_pager):
    pager = make_pager(device_bytes=64 * 4096)
    model = nn.Sequential(nn.Embedding(300, 64), *[nn.Linear(64, 64) for _ in range(40)], nn.Linear(64, 300))
    model[-1].weight = model[0].weight
    model.register_buffer("nothing", torch.empty(0, 5))
    model[1].weight.note = {"kept": [1]}
    model[2].weight.requires_grad_(False)
    pager.page_(model, min_bytes=0)
    twin = copy.deepcopy(model)
    assert twin[-1].weight is twin[0].weight and twin.nothing.shape == (0, 5)
    assert twin[1].weight.note == {"kept": [1]} and twin[1].weight.note is not model[1].weight.note
    assert not twin[2].weight.requires_grad and twin[3].weight.requires_grad
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        for p in twin.parameters():
            assert p._region is not dict(model.named_parameters()).get("none")
            p.zero_()
    assert all(same(t, before[name]) for name, t in model.state_dict().items())
    assert pager.stats().device.peak_bytes <= 64 * 4096


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_a7_items_of_a_loader_have_their_dtype_and_values(pager):
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        values = [torch.arange(5).add(i).to(dtype) for i in range(4)]
        items = Items([pager.tensor(value) for value in values])
        found = list(torch.utils.data.DataLoader(items, batch_size=2))
        assert all(type(batch) is torch.Tensor and batch.dtype == dtype for batch in found)
        assert torch.equal(torch.cat(found), torch.stack(values))


def test_a7_items_in_a_worker_process_are_refused_by_name(pager):
    items = Items([pager.tensor(torch.arange(5)) for _ in range(2)])
    loader = torch.utils.data.DataLoader(items, batch_size=None, num_workers=1, timeout=60)
    with pytest.raises(PagerClosed, match="sent through a queue"):
        list(loader)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.full((1600,), 1.5))

    def forward(self, x):
        return functional.linear(x, self.child.weight) * self.scale[:40]

    def penalty(self):
        return sum(p.norm() for p in self.parameters())


def test_a9_weights_are_read_wherever_and_the_device_is_the_one_that_computes(pager):
    torch.manual_seed(0)
    plain = Reader()
    paged = pager.page_(copy.deepcopy(plain), min_bytes=0)
    for p in paged.parameters():
        p.evict()
        assert p.device == torch.device("cpu") and not p.is_meta
    x = torch.ones(2, 40)
    assert same(paged(x), plain(x)) and same(paged.penalty(), plain.penalty())
    for module in (plain, paged):
        (module(x).sum() + module.penalty()).backward()
    assert all(same(a.grad, b.grad) for a, b in zip(paged.parameters(), plain.parameters(), strict=True))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 40)
        self.lm_head = nn.Linear(40, 50, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, x):
        return self.lm_head(self.embed(x))


def test_a10_tied_weight_is_one_page_one_gradient_one_file_and_can_be_untied(pager):
    torch.manual_seed(0)
    plain = Tied()
    paged = copy.deepcopy(plain)
    reserved = pager.stats().reserved_bytes
    pager.page_(paged, min_bytes=0)
    assert pager.stats().reserved_bytes - reserved == 2 * 4096
    x = torch.arange(20)
    for module in (plain, paged):
        train(module, x)
        if module is paged:
            module.embed.weight.evict()
    assert paged.lm_head.weight is paged.embed.weight and same(paged.embed.weight, plain.embed.weight)
    assert same(paged.embed.weight.grad, plain.embed.weight.grad)
    file = io.BytesIO()
    torch.save(paged.state_dict(keep_vars=True), file)
    assert file.tell() < 1.5 * paged.embed.weight.nbytes
    file.seek(0)
    loaded = {name: p.detach() for name, p in torch.load(file).items()}
    assert loaded["lm_head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    twin = pager.page_(Tied(), min_bytes=0)
    twin.load_state_dict(loaded)
    assert twin.lm_head.weight is twin.embed.weight and same(twin.embed.weight, plain.embed.weight)
    paged.lm_head.weight = nn.Parameter(paged.embed.weight.detach().clone())
    with torch.no_grad():
        paged.lm_head.weight.zero_()
    assert same(paged.embed.weight, plain.embed.weight)


DTYPES = [
    *[torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64],
    *[torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32],
    *[torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn],
    *[torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5000,)])
def test_a11_every_dtype_comes_back_bit_for_bit_through_all_tiers(make_pager, dtype, shape):
    pager = make_pager(device_bytes=16 * 4096)
    count = torch.empty(shape).numel()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    raw = raw.remainder(2) if dtype is torch.bool else raw
    value = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    paged = pager.tensor(value)
    paged.evict()
    floods = [pager.tensor(torch.ones(6 * 1024)) for _ in range(4)]
    for flood in floods:
        flood.add_(1)
    back = torch.empty(shape, dtype=dtype).copy_(paged)
    assert back.reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))


def test_a11_layouts_that_cannot_be_paged_are_refused_when_wrapped(pager):
    for value, name in (
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (torch.ones(3, device="meta"), "meta"),
    ):
        with pytest.raises(UnsupportedTensor, match=name):
            pager.tensor(value)


@pytest.mark.parametrize("fused", [False, True])
def test_a12_tensors_of_no_bytes_work_in_everything(pager, fused):
    module = nn.Linear(40, 40)
    module.empty = nn.Parameter(torch.empty(0, 7))
    module.register_buffer("none", torch.empty(5, 0, dtype=torch.int64))
    plain = copy.deepcopy(module)
    pager.page_(module, min_bytes=0)
    for m in (plain, module):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused)
        (m(torch.ones(2, 40)).sum() + m.empty.sum()).backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
    module.empty.evict()
    assert same(module.weight, plain.weight) and module.empty.grad.shape == (0, 7)
    file = io.BytesIO()
    torch.save(copy.deepcopy(module).state_dict(), file)
    file.seek(0)
    module.load_state_dict(torch.load(file))
    assert module.none.shape == (5, 0) and module.none.dtype == torch.int64
    pager.unpage_(module)
    assert module.empty.shape == (0, 7) and type(module.empty) is nn.Parameter


def test_a13_evicted_parameters_show_their_whole_shape_and_a_bigger_one_frees_the_old_pages(pager):
    module = pager.page_(nn.Embedding(100, 40), min_bytes=0)
    weight = module.weight
    weight.evict()
    assert weight.shape == (100, 40) and weight.numel() == 4000 and weight.stride() == (40, 1)
    assert weight.nbytes == 16000 and module.state_dict()["weight"].shape == (100, 40)
    reserved, old = pager.stats().reserved_bytes, weight.detach().clone()
    bigger = pager.zeros(120, 40)
    bigger[:100] = weight.detach()
    module.weight = nn.Parameter(bigger)
    del weight, bigger
    assert pager.stats().reserved_bytes - reserved < 16000 + 2 * 4096 + 19200
    assert same(module.weight[:100], old) and module(torch.tensor([119])).sum().item() == 0


ADDRESSES = {
    "data_ptr": lambda t: t.data_ptr(),
    "storage": lambda t: t.untyped_storage().data_ptr(),
    "typed storage": lambda t: t.storage().data_ptr(),
    "dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "__dlpack__": lambda t: t.__dlpack__(),
    "numpy": lambda t: t.numpy(),
}


@pytest.mark.parametrize("name", ADDRESSES)
@pytest.mark.parametrize("evicted", [False, True])
def test_a14_no_address_is_given_and_the_error_names_the_way_to_one(pager, name, evicted):
    tensor = pager.tensor(torch.ones(40, 40))
    if evicted:
        tensor.evict()
    with pytest.raises((UnsupportedOperator, RuntimeError, BufferError), match=r"resident|annot access"):
        ADDRESSES[name](tensor)
    with tensor.resident() as dense:
        assert ctypes.c_float.from_address(dense.data_ptr()).value == 1.0
        address = dense.data_ptr()
    assert dense.numel() == 0 and address


def test_a14_no_cuda_array_interface_is_claimed_on_the_processor(pager):
    assert not hasattr(pager.tensor(torch.ones(3)), "__cuda_array_interface__")


def test_a15_compiled_module_gives_the_numbers_of_an_eager_one_wherever_its_pages_are(pager):
    plain = nn.Sequential(nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 40))
    paged = pager.page_(copy.deepcopy(plain), min_bytes=0)
    compiled = torch.compile(paged, backend="eager")
    x = torch.ones(2, 40)
    for _ in range(3):
        for p in paged.parameters():
            p.evict()
        assert same(compiled(x), plain(x))
    paged.double()
    plain.double()
    assert same(compiled(x.double()), plain(x.double()))


def test_a18_creating_printing_and_looking_at_metadata_move_nothing(make_pager):
    pager = make_pager(device_bytes=16 * 4096)
    tensors = [pager.tensor(torch.full((1024,), float(i))) for i in range(40)]
    for tensor in tensors[-8:]:
        tensor.sum()
    before = pager.stats()
    made = [pager.empty(1024), pager.zeros(5, 5), torch.zeros_like(tensors[0])]
    for tensor in (*tensors, *made):
        repr(tensor), tensor.shape, tensor.stride(), tensor.device, tensor.nbytes, tensor.view(-1), tensor.tier
        f"{tensor}"
    after = pager.stats()
    assert (after.evictions, after.faults, after.moved_bytes) == (
        before.evictions,
        before.faults,
        before.moved_bytes,
    )
    try:
        raise ValueError
    except ValueError:
        assert tensors[0].sum().item() == 0  # operators work in a handler, and evict there


@pytest.mark.parametrize("policy_of_hook", [lambda t: t * 2, lambda t: t.sum() + t])
def test_a18_tensors_are_made_and_read_in_hooks_near_the_limit(make_pager, policy_of_hook):
    pager = make_pager(device_bytes=16 * 4096)
    module = pager.page_(nn.Sequential(*[nn.Linear(40, 40) for _ in range(8)]), min_bytes=0)
    plain = copy.deepcopy(module)
    pager.unpage_(plain)
    for m in (module, plain):
        for part in m:
            part.weight.register_hook(policy_of_hook)
        m(torch.ones(2, 40)).sum().backward()
    assert all(same(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
