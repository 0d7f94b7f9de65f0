# SPDX-License-Identifier: Apache-2.0
"""A small model and its training loop, with steps in the backward pass and without."""

from __future__ import annotations

import contextlib

import torch
from stepping import plain, same
from torch import nn

WIDTH = 48
SOME = 128 * 4096
LEAST = 26 * 4096  # an eighth of the weights and their gradients alone


class Model(nn.Module):
    """Tied, shared, frozen, unused and small parameters, and some that take most of the smallest device below."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 333) for _ in range(3))  # the last page is not full
        self.narrow = nn.ModuleList(nn.Linear(333, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)  # small ones stay plain
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight
        self.body[1].requires_grad_(False)

    def forward(self, tokens, sometimes=True, around=lambda part, x: part(x)):
        x = self.embed(tokens)
        for layer in [*self.body, self.body[0]]:
            x = x + torch.tanh(around(layer, x))
        for wide, narrow in zip(self.wide, self.narrow):
            x = x + around(lambda y, wide=wide, narrow=narrow: narrow(torch.tanh(wide(y))), x)
        if sometimes:
            x = x + self.sometimes(x)
        return self.head(self.norm(x))


def loss_of(model, seed, **options):
    torch.manual_seed(1000 + seed)
    tokens = torch.randint(40, (2, 9))
    out = model(tokens, **options)
    return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **{"lr": 0.01, "fused": True, **options})


def build(pager=None):
    torch.manual_seed(0)
    model = Model()
    return model if pager is None else pager.page_(model, min_bytes=1024)


def values(model, optimizer):
    found = {name: plain(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = plain(value)
    return found


def check_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not same(one[name], other[name])] == []


def run(pager, loop, make=adamw, **options):
    """Call `loop` with a model, its optimizer and its stepping; return all that it left."""
    model = build(pager)
    optimizer = make(model.parameters())
    stepping = Nothing() if pager is None else pager.step_in_backward(optimizer, **options)
    losses = loop(model, optimizer, stepping)
    found = values(model, optimizer)
    found["losses"] = torch.tensor(losses)
    return found


class Nothing:
    """In the place of a stepping, for the run without one."""

    def accumulating(self):
        return contextlib.nullcontext()


def check_loop(pager, loop, make=adamw, **options):
    check_same(run(None, loop, make), run(pager, loop, make, **options))


def simply(model, optimizer, stepping, steps=3, **options):
    losses = []
    for seed in range(steps):
        loss = loss_of(model, seed, **options)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
