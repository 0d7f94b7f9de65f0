# SPDX-License-Identifier: Apache-2.0
"""torch.save and load_state_dict of paged models and optimizers: plain files, and paged state after a load."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pagert
from pagert.tensor import PagedTensor, copying


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 40)
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(2)])
        self.norm = nn.LayerNorm(40)
        self.head = nn.Linear(40, 60, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(40, 40))

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = self.norm(torch.relu(layer(x))) @ self.scale
        return self.head(x)


def make(seed=0):
    torch.manual_seed(seed)
    return Net()


def plain(tensor):
    return copying.load(PagedTensor, tensor.detach()) if type(tensor) is PagedTensor else tensor


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    loss = model(torch.randint(0, 60, (4, 7), generator=generator)).logsumexp(-1).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def saved(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def loaded(data, **options):
    return torch.load(io.BytesIO(data), **{"weights_only": True, **options})


def assert_paged(tensors):
    for tensor in tensors:
        assert (type(tensor) is PagedTensor) == (tensor.numel() * tensor.itemsize >= 1024)


# torch.save


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("keep_vars", [True, False])
def test_saved_state_is_plain_and_its_ties_are_written_once(new_format, keep_vars, pager):
    """D1, D3, A10."""
    expected, model = make(), pager.page_(make(), min_bytes=0)
    model.head.weight.note = "kept"
    options = {"_use_new_zipfile_serialization": new_format}
    ours = saved(model.state_dict(keep_vars=keep_vars), **options)
    theirs = saved(expected.state_dict(keep_vars=keep_vars), **options)
    assert b"pagert" not in ours
    assert abs(len(ours) - len(theirs)) < 512
    state = loaded(ours)
    for name, tensor in expected.state_dict(keep_vars=keep_vars).items():
        assert type(state[name]) is type(tensor)
        assert torch.equal(state[name], tensor) and state[name].stride() == tensor.stride()
    tied = [
        state[name].untyped_storage().data_ptr() for name in ("head.weight", "embedding.weight")
    ]
    assert tied[0] == tied[1]
    if keep_vars:
        assert state["head.weight"] is state["embedding.weight"]
        assert state["head.weight"].note == "kept"


def test_a_save_reads_one_tensor_at_a_time(pager, monkeypatch):
    """D5."""
    model = pager.page_(make(), min_bytes=0)
    real, references, alive = copying.load, [], []

    def counting(*arguments):
        plain = real(*arguments)
        alive.append(sum(not reference.expired() for reference in references))
        references.append(StorageWeakRef(plain.untyped_storage()))
        return plain

    monkeypatch.setattr(copying, "load", counting)
    saved(model.state_dict())
    assert len(references) > 5 and max(alive) <= 1


def test_a_saved_slice_takes_the_bytes_of_a_slice(pager):
    """D8."""
    slab = pager.tensor(torch.randn(50_000))
    data = saved({"part": slab[100:200], "same": slab[100:200], "other": slab[150:250]})
    assert len(data) < 6000
    state = loaded(data)
    assert torch.equal(state["part"], plain(slab)[100:200])
    assert torch.equal(state["other"], plain(slab)[150:250])
    assert state["part"].data_ptr() == state["same"].data_ptr()


def test_a_whole_paged_module_and_what_has_no_storage_of_its_kind_are_saved(pager):
    model = loaded(saved(pager.page_(make(), min_bytes=0)), weights_only=False)
    assert type(model.head.weight) is nn.Parameter and model.head.weight is model.embedding.weight
    complex_numbers = pager.tensor(torch.randn(4) + 1j)
    values = [
        complex_numbers.conj(),
        pager.tensor(torch.ones(3, dtype=torch.uint16)),
        pager.empty(0),
    ]
    for found, value in zip(loaded(saved(values)), values):
        assert torch.equal(found.resolve_conj(), plain(value).resolve_conj())


# load_state_dict of a module


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_state_is_in_pages(assign, make_pager):
    expected, model = make(1), make_pager().page_(make(0))
    state = loaded(saved(expected.state_dict()))
    model.load_state_dict(state, assign=assign)
    assert_paged([*model.parameters(), *model.buffers()])
    for name, tensor in model.state_dict().items():
        assert torch.equal(plain(tensor), state[name]), name
    assert model.head.weight._region is model.embedding.weight._region
    assert all(parameter.requires_grad for parameter in model.parameters())
    # What was assigned is one with the state, as it is without pages; what was copied is not.
    twin, its_state = make(0), loaded(saved(expected.state_dict()))
    twin.load_state_dict(its_state, assign=assign)
    with torch.no_grad():
        model.layers[0].weight.add_(1)
        twin.layers[0].weight.add_(1)
    assert torch.equal(plain(state["layers.0.weight"]), its_state["layers.0.weight"])


def test_two_loads_of_one_state_by_assignment_are_tied_as_without_pages(pager):
    state = make(1).state_dict()
    first, second = pager.page_(make()), pager.page_(make())
    first.load_state_dict(state, assign=True)
    state["layers.0.weight"].zero_()
    second.load_state_dict(state, assign=True)
    assert torch.count_nonzero(plain(first.layers[0].weight)) == 0
    assert torch.count_nonzero(plain(second.layers[0].weight)) == 0
    assert first.layers[0].weight._region is second.layers[0].weight._region


def test_an_assignment_outside_of_a_load_means_what_it_says(pager):
    model = pager.page_(make())
    model.layers[0].weight = nn.Parameter(torch.zeros(40, 40))
    assert type(model.layers[0].weight) is nn.Parameter
    untouched = make()
    untouched.load_state_dict(make(1).state_dict(), assign=True)
    assert type(untouched.layers[0].weight) is nn.Parameter


def test_assigned_tensors_train_bitwise_as_plain_ones(make_pager):
    results = []
    for paged in (False, True):
        model = make_pager(device_bytes=64 << 10).page_(make()) if paged else make()
        model.load_state_dict(copy.deepcopy(make(1).state_dict()), assign=True)
        model.head.weight = model.embedding.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results.append([step(model, optimizer, number) for number in range(3)])
    assert results[0] == results[1]


# load_state_dict of an optimizer

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("made", ["before paging", "after paging"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one_with_state_in_pages(name, made, make_pager):
    """B9, B11: step counts, moments and learning rates are restored exactly."""
    model = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    expected, data = [], b""
    for number in range(5):
        if number == 3:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            data = saved({key: part.state_dict() for key, part in parts.items()})
        expected.append(step(model, optimizer, number))
        scheduler.step()
    resumed = make(5)
    pager = make_pager(device_bytes=96 << 10)
    if made == "after paging":
        pager.page_(resumed)
    again = OPTIMIZERS[name](resumed.parameters())
    if made == "before paging":
        pager.page_(resumed)
    rate = torch.optim.lr_scheduler.ExponentialLR(again, 0.9)
    state = loaded(data)
    resumed.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    rate.load_state_dict(state["scheduler"])
    for parameter in resumed.parameters():
        made_after = [value for key, value in again.state[parameter].items() if key != "step"]
        if type(parameter) is PagedTensor:
            assert_paged(made_after)
    for number in (3, 4):
        assert step(resumed, again, number) == expected[number]
        rate.step()
    for ours, theirs in zip(resumed.parameters(), model.parameters()):
        assert torch.equal(plain(ours), theirs)
    ours, theirs = loaded(saved(again.state_dict())), optimizer.state_dict()
    for index, values in theirs["state"].items():
        for key, value in values.items():
            found = ours["state"][index][key]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
            assert type(found) is type(value)


def test_state_of_a_paged_optimizer_goes_to_a_plain_one_without_a_file(pager):
    model = pager.page_(make())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    other = make()
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(optimizer.state_dict())
    for values in again.state.values():
        assert all(type(value) is torch.Tensor for value in values.values())


def test_state_is_converted_to_the_parameter_s_dtype_on_its_way(pager):
    model = pager.page_(make())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    state = loaded(saved(optimizer.state_dict()))
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"].double()
    optimizer.load_state_dict(state)
    for parameter, values in optimizer.state.items():
        assert values["exp_avg"].dtype == torch.float32
        assert type(values["exp_avg"]) is (
            PagedTensor if type(parameter) is PagedTensor else torch.Tensor
        )


def quasi_newton(model, state=None):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    if state is not None:
        optimizer.load_state_dict(state)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(28).reshape(4, 7)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return optimizer, closure().item()


def test_a_vector_over_all_parameters_stays_plain(make_pager):
    """LBFGS joins all parameters in one vector; plain, it may be larger than the device tier."""
    results = []
    for paged in (False, True):
        model = make_pager(device_bytes=64 << 10).page_(make()) if paged else make()
        optimizer, _ = quasi_newton(model)
        again, loss = quasi_newton(model, loaded(saved(optimizer.state_dict())))
        results.append(loss)
        (values,) = again.state.values()
        assert type(values["prev_flat_grad"]) is torch.Tensor
    assert results[0] == results[1]


def test_pagert_save_reads_no_gradient_and_changes_nothing(pager, tmp_path):
    model = pager.page_(make(), min_bytes=0)
    model(torch.ones(2, 3, dtype=torch.int64)).sum().backward()
    versions = [parameter._version for parameter in model.parameters()]
    pagert.save(model, tmp_path / "m.safetensors")
    assert [parameter._version for parameter in model.parameters()] == versions
    assert all(type(parameter.grad) is PagedTensor for parameter in model.parameters())
