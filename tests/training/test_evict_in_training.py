# SPDX-License-Identifier: Apache-2.0
"""Whoever moves tensors off the device in the middle of training gets that done, whatever is predicted."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import pagert

TOKENS = torch.arange(40).view(2, 20) * 7 % 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x)))) * 0.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.embed.weight).square().mean()


def test_evict_ends_although_the_same_pages_are_predicted_to_be_used_next() -> None:
    """Prefetch brought back what was evicted, for ever, and evict() waited."""
    with pagert.Pager(
        device="cpu",
        device_bytes=1 << 19,
        page_bytes=4096,
        host_bytes=64 << 20,
        deadline_seconds=20,
        warn_seconds=20,
    ) as pager:
        for _ in range(4):
            model = pager.page_(Model(), min_bytes=64)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            for _ in range(3):
                model(TOKENS).backward()
                for parameter in model.parameters():
                    parameter.evict()
                optimizer.step()
                optimizer.zero_grad()
