# SPDX-License-Identifier: Apache-2.0
"""torch.compile of paged modules, and tracers: the numbers of plain ones, or a refusal by name."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch
import torch._dynamo
from pagers import MIB
from stepping import plain, same
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pagert
from pagert.errors import UnsupportedOperator

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own parts
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)

    def forward(self, x):
        h = functional.gelu(self.up(self.norm(x))) * 2 + 1
        return x + self.down(h) * 0.5


class Model(torch.nn.Module):
    """Takes about 1.1 MiB, 4.4 with gradients and the state of Adam."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(512, 64)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(6)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.embed.weight).square().mean()


TOKENS = torch.arange(40).view(2, 20) * 7 % 512


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def pager():
    with pagert.Pager(
        device="cpu", device_bytes=MIB // 2, host_bytes=16 * MIB, page_bytes=4096
    ) as pager:
        yield pager


def build(pager=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = Model().to(dtype)
    return model if pager is None else pager.page_(model, min_bytes=64)


def evict(model):
    for tensor in model.parameters():
        tensor.evict()


def compiled_frames():
    """Functions of the package of which Dynamo has compiled something."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "pagert":
            for value in list(vars(module).values()):
                code = getattr(value, "__code__", None)
                if code and torch._dynamo.eval_frame._debug_get_cache_entry_list(code):
                    found.append(f"{name}.{value.__name__}")
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a15_a_compiled_paged_module_gives_its_own_numbers_wherever_its_pages_are(pager, backend):
    """A15. What is compiled lies between the operators on paged tensors; it rounds as the backend does."""
    model = build(pager)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        expected = build()(TOKENS)
        first = compiled(TOKENS)
        for _ in range(3):
            evict(model)
            assert same(compiled(TOKENS), first)
        model.embed.weight.mul_(0.5)  # a graph that had the bytes would not see this
        evict(model)
        changed = compiled(TOKENS)
        assert not same(changed, first)
        other = build()
        other.embed.weight.mul_(0.5)
        if backend == "inductor":
            torch.testing.assert_close(first, expected)
            torch.testing.assert_close(changed, other(TOKENS))
        else:
            assert same(first, expected) and same(changed, other(TOKENS))
    assert counter.frame_count > 0 and counter.op_count > 0
    assert compiled_frames() == []
    assert pager.stats().device.peak_bytes <= MIB // 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_a_compiled_paged_module_is_training_a_compiled_plain_one(pager, backend):
    results = []
    for place in (None, pager):
        torch._dynamo.reset()
        model = build(place)
        # Plain: eager, which the two backends that compute nothing themselves must match bit for bit.
        compiled = torch.compile(model, backend=backend) if place is not None else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        losses = []
        for _ in range(3):
            loss = compiled(TOKENS)
            loss.backward()
            if place is not None:
                evict(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append([*losses, *model.state_dict().values()])
    if backend == "inductor":
        for one, other in zip(*results):
            torch.testing.assert_close(one, plain(other), atol=1e-4, rtol=1e-3)
    else:
        assert all(same(one, other) for one, other in zip(*results))
    assert compiled_frames() == []


def test_a_whole_step_may_be_compiled(pager):
    results = []
    for place in (None, pager):
        model = build(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(tokens, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            return loss * 2

        run = step if place is None else torch.compile(step, backend="aot_eager")
        results.append([*(run(TOKENS).detach() for _ in range(2)), *model.state_dict().values()])
    assert all(same(one, other) for one, other in zip(*results))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@needs_compiler
def test_a15_modes_of_compilation_give_the_numbers_of_the_plain_module(pager, mode):
    model = build(pager)
    compiled = torch.compile(model, mode=mode)
    with torch.no_grad():
        for _ in range(2):
            evict(model)
            torch.testing.assert_close(compiled(TOKENS), build()(TOKENS))


def test_a15_a_module_may_be_converted_paged_and_unpaged_after_it_was_compiled(pager):
    model = build()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        expected = build()(TOKENS)
        assert same(compiled(TOKENS), expected)
        pager.page_(model, min_bytes=64)
        evict(model)
        assert same(compiled(TOKENS), expected)
        model.to(torch.bfloat16)
        evict(model)
        assert same(compiled(TOKENS), build(dtype=torch.bfloat16)(TOKENS))
        model.to(torch.float32)
        pager.unpage_(model)
        assert same(compiled(TOKENS), build(dtype=torch.bfloat16).float()(TOKENS))


def test_changes_in_place_inside_of_compiled_code_reach_the_pages(pager):
    def change(paged, plain):
        paged.mul_(2).add_(plain.sin() * 3)
        view = paged[3:5]
        view.zero_()
        return paged.sum() + (plain * 2).relu().sum()

    x, y = torch.randn(64, 64), torch.randn(64, 64)
    paged = pager.tensor(x)
    compiled = torch.compile(change, backend="aot_eager")
    for _ in range(3):
        assert same(change(x, y), compiled(paged, y))
        paged.evict()
        assert same(x, paged)


def test_residency_asked_for_in_compiled_code_is_that_of_the_moment(pager):
    def ask(paged):
        with paged.resident("read") as dense:
            total = dense.sum() * 2
        paged.evict()
        return total, paged.tier

    paged = pager.tensor(torch.ones(64, 64))
    compiled = torch.compile(ask, backend="aot_eager")
    for factor in (1, 2):
        total, tier = compiled(paged)
        assert total == 8192 * factor and tier == "host"
        paged.mul_(2)
    assert compiled_frames() == []


def test_a_whole_graph_over_paged_tensors_is_refused_by_dynamo(pager):
    paged = pager.tensor(torch.ones(64, 64))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="PagedTensor"):
        torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(paged)
    assert same(paged * 2, torch.full((64, 64), 2.0))


TRACERS = {
    "make_fx": lambda p, t: make_fx(lambda t: p @ t)(t),
    "make_fx, fake": lambda p, t: make_fx(lambda t: p @ t, tracing_mode="fake")(t),
    "linearize": lambda p, t: torch.func.linearize(lambda x: (x @ p).sum(), t),
    "export": lambda p, t: torch.export.export(Holder(p), (t,)),
}


class Holder(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = torch.nn.Parameter(p)

    def forward(self, t):
        return self.p @ t


@pytest.mark.parametrize("name", TRACERS)
def test_tracers_that_would_keep_addresses_are_refused_by_name(pager, name):
    paged, plain = pager.tensor(torch.randn(8, 8)), torch.randn(8, 8)
    with pytest.raises((UnsupportedOperator, TypeError), match=r"of a paged tensor|PagedTensor|traced by"):
        TRACERS[name](paged, plain)
    assert same(paged @ plain, paged.clone() @ plain)


def test_modes_that_only_look_see_the_operators_and_change_nothing(pager):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            names.append(str(function))
            return function(*arguments, **(options or {}))

    names: list[str] = []
    x = torch.randn(64, 64)
    paged = pager.tensor(x)
    with Names(), FlopCounterMode(display=False) as counter:
        assert same(x.t() @ x + 1, paged.t() @ paged + 1)
    assert counter.get_total_flops() == 4 * 64**3
    assert names.count("aten.mm.default") == 2
