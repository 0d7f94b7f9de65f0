# SPDX-License-Identifier: Apache-2.0
"""Random programs of views, in-place operators and rebinding, on paged and on plain tensors."""

from __future__ import annotations

import pagers
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pagert.tensor import PagedTensor

FRAMES = 24
PAGE_BYTES = 4096


def look(tensor, name, *numbers):
    """Return a view by name; the tensor itself, detached, where its shape does not allow it."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if name == "t" and tensor.dim() <= 2:
        return tensor.t()
    if name == "flatten" and tensor.is_contiguous():
        return tensor.flatten()
    if name == "narrow":
        return tensor.narrow(0, *numbers)
    if name == "step" and tensor.dim():
        return tensor[..., :: numbers[0]]
    if name == "unsqueeze":
        return tensor.unsqueeze(0) if tensor.dim() < 4 else tensor.squeeze()
    if name == "expand" and rows:
        return tensor[:1].expand(3, *tensor.shape[1:])
    if name == "bytes":
        return tensor.view(torch.int32).view(torch.float32).view(tensor.dtype)
    if name == "unfold" and rows > 1 and tensor.dim() < 4:
        return tensor.unfold(0, 2, 1)
    return tensor.detach()


class Programs(RuleBasedStateMachine):
    """Pairs of a paged and a plain tensor go through the same operators; their bytes stay equal."""

    setup = "fake"

    def __init__(self):
        super().__init__()
        self.pager = pagers.open_pager(self.setup, FRAMES * PAGE_BYTES, PAGE_BYTES)
        self.pairs = []
        self.step = 0

    def teardown(self):
        pagers.check_idle(self.pager)
        self.pager.close()

    def choose(self, data):
        return data.draw(st.sampled_from(self.pairs))

    def add(self, paged, plain):
        assert type(paged) is PagedTensor
        assert paged.shape == plain.shape and paged.stride() == plain.stride()
        assert paged.storage_offset() == plain.storage_offset() and paged.dtype == plain.dtype
        self.pairs = [*self.pairs, (paged, plain)][-8:]

    @rule(
        rows=st.integers(0, 70),
        columns=st.integers(0, 70),
        dtype=st.sampled_from([torch.float32, torch.int32]),
    )
    def make(self, rows, columns, dtype):
        self.step += 1
        torch.manual_seed(self.step)
        plain = torch.randint(-9, 9, (rows, columns)).to(dtype)
        self.add(self.pager.tensor(plain), plain)

    @rule(data=st.data())
    def view(self, data):
        if not self.pairs:
            return
        paged, plain = self.choose(data)
        choices = [
            "t",
            "detach",
            "flatten",
            "narrow",
            "step",
            "unsqueeze",
            "expand",
            "bytes",
            "unfold",
        ]
        name = data.draw(st.sampled_from(choices))
        if name == "narrow":
            if plain.dim() == 0 or plain.shape[0] == 0:
                return
            start = data.draw(st.integers(0, plain.shape[0] - 1))
            numbers = (start, data.draw(st.integers(0, plain.shape[0] - start)))
        else:
            numbers = (data.draw(st.integers(1, 5)),)
        self.add(look(paged, name, *numbers), look(plain, name, *numbers))

    @rule(
        data=st.data(),
        value=st.integers(-3, 3),
        name=st.sampled_from(["add_", "mul_", "fill_", "zero_", "clamp_"]),
    )
    def write(self, data, value, name):
        if not self.pairs:
            return
        paged, plain = self.choose(data)
        if torch._debug_has_internal_overlap(plain) != 0:
            return
        arguments = () if name == "zero_" else (value,)
        version = paged._version
        assert getattr(paged, name)(*arguments) is paged
        getattr(plain, name)(*arguments)
        assert paged._version > version

    @rule(data=st.data())
    def assign(self, data):
        """Copy between any two, through a clone where they are of one region."""
        if not self.pairs:
            return
        (paged, plain), (other, other_plain) = self.choose(data), self.choose(data)
        if torch._debug_has_internal_overlap(plain) != 0 or plain.shape != other_plain.shape:
            return
        if data.draw(st.booleans()):
            other = other_plain  # a plain source
        plain.copy_(other_plain.clone())
        if (type(other) is PagedTensor and other._region is paged._region) or type(
            other
        ) is not PagedTensor:
            other = other.clone()
        paged.copy_(other)

    @rule(data=st.data())
    def renew(self, data):
        if not self.pairs:
            return
        paged, plain = self.choose(data)
        call = data.draw(
            st.sampled_from(
                [
                    torch.clone,
                    torch.zeros_like,
                    torch.ones_like,
                    lambda t: t.to(torch.float32, copy=True),
                ]
            )
        )
        one, other = call(paged), call(plain)
        assert one.stride() == other.stride()
        self.add(one, other)

    @rule(data=st.data())
    def rebind(self, data):
        if not self.pairs:
            return
        (paged, plain), (other, other_plain) = self.choose(data), self.choose(data)
        paged.data, plain.data = other.data, other_plain.data

    @rule(data=st.data())
    def move(self, data):
        if not self.pairs:
            return
        paged, _ = self.choose(data)
        data.draw(st.sampled_from([PagedTensor.evict, PagedTensor.prefetch, repr]))(paged)

    @rule(data=st.data())
    def forget(self, data):
        if self.pairs:
            self.pairs.pop(data.draw(st.integers(0, len(self.pairs) - 1)))

    @invariant()
    def bytes_are_equal(self):
        for paged, plain in self.pairs:
            assert torch.equal(paged, plain)


def check(setup, examples):
    machine = type("Programs", (Programs,), {"setup": setup})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=30, deadline=None, print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_random_programs_over_the_fake_runtime_equal_plain_pytorch():
    check("fake", 60)


if pagers.REAL:

    def test_random_programs_over_host_memory_equal_plain_pytorch():
        check("host", 60)
