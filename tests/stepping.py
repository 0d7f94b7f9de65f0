# SPDX-License-Identifier: Apache-2.0
"""Optimizers that take the same steps on plain and on paged parameters, for the tests of deferred updates."""

from __future__ import annotations

import pytest
import torch
from pagers import MIB
from torch import nn

import pagert

# With float32 and Adam's lists about 1.5 MiB: more than a quarter of the devices below, several ranges each, the
# third as long as no vector; and some that take one page and less.
SIZES = [(160, 100), (40,), (37, 613), (1,), (21_000,), (3, 5, 7)]


def open_pager(**settings) -> pagert.Pager:
    """A pager of one mebibyte in pages of 4 KiB over a host tier that holds everything."""
    settings = {"device_bytes": MIB, "page_bytes": 4096, "host_bytes": 32 * MIB, **settings}
    return pagert.Pager(device="cpu", **settings)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values, as a plain tensor that shares nothing."""
    tensor = tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same bytes: signs of zeros and NaNs count."""
    one, other = plain(one), plain(other)
    return (
        one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def waits(tensor: torch.Tensor) -> bool:
    """Whether an update of this paged tensor was deferred and did not run yet."""
    update = tensor._region.deferred
    return update is not None and update.waits


class Pair:
    """The same parameters twice, each with an optimizer of its own; `make` makes one of parameters."""

    def __init__(self, pager, make, sizes=SIZES, dtype=torch.float32):
        torch.manual_seed(0)
        values = [torch.randn(size).to(dtype) for size in sizes]
        self.pager = pager
        self.plain = [nn.Parameter(value.clone()) for value in values]
        self.paged = [pager.tensor(value, requires_grad=True) for value in values]
        self.optimizers = [make(self.plain), make(self.paged)]
        self.steps = 0

    def give_gradients(self) -> None:
        torch.manual_seed(1000 + self.steps)
        for one, other in zip(self.plain, self.paged, strict=True):
            gradient = torch.randn(one.shape).to(one.dtype)
            one.grad = gradient.clone()
            other.grad = self.pager.tensor(gradient)

    def step(self) -> None:
        """One step of both. The gradients stay."""
        self.give_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1

    def tensors(self, index: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The plain and the paged tensor of each kind that belong to one parameter."""
        one, other = self.plain[index], self.paged[index]
        found = {"parameter": (one, other)}
        if one.grad is not None:
            found["gradient"] = (one.grad, other.grad)
        states = [
            optimizer.state[parameter]
            for optimizer, parameter in zip(self.optimizers, (one, other), strict=True)
        ]
        assert states[0].keys() == states[1].keys()
        found |= {name: (states[0][name], states[1][name]) for name in states[0]}
        return {name: pair for name, pair in found.items() if isinstance(pair[0], torch.Tensor)}

    def check(self) -> None:
        """Assert that everything is bitwise the same, and that nothing waits afterwards."""
        for index in range(len(self.plain)):
            for name, (one, other) in self.tensors(index).items():
                assert same(one, other), (index, name)
        self.pager.flush()
        assert not any(update.waits for update in list(self.pager.deferred.values()))
        assert self.pager.pump.check() == 0
        assert self.pager.stats().held_bytes == 0


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **{"lr": 0.01, "fused": True, **options})


@pytest.fixture
def pair(pager):
    """After a step of which every update waits."""
    pair = Pair(pager, adamw)
    pair.step()
    assert all(waits(parameter) for parameter in pair.paged)
    return pair
