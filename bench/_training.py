# SPDX-License-Identifier: Apache-2.0
"""Training jobs whose traces are worth a look: the demo's language model, and three made shapes.

The lower tier is host memory: what operators need does not depend on where pages lie below, and nothing
waits for flash. `device_bytes` matters, since list operators run in groups that fit it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import pagert

MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """One training job to record, and the budgets to compare policies at."""

    name: str
    device_bytes: int
    page_bytes: int
    record: Callable[[Job, int], pagert.Trace]

    def pager(self) -> pagert.Pager:
        """Open a pager with room below for everything."""
        return pagert.Pager(
            device="cpu", device_bytes=self.device_bytes, host_bytes="3GiB",
            page_bytes=self.page_bytes,
        )  # fmt: skip


class Block(nn.Module):
    """A transformer's block, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add attention, then the MLP."""
        mixed = self.attention_in(self.before_attention(hidden)).chunk(3, dim=-1)
        query, key, value = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in mixed)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(seen.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.before_mlp(hidden))


class LanguageModel(nn.Module):
    """Like GPT-2: learned positions, the head tied to the embedding."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.last = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give the logits of the next token."""
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.last(self.blocks(hidden)) @ self.tokens.weight.t()


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank addition that is trained (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Add the low-rank product to the frozen layer."""
        return self.base(value) + (value @ self.down.t()) @ self.up.t()


def adapt(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model and adapt its linear layers."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child, rank))
    return model


def record_smollm2(job: Job, steps: int) -> pagert.Trace:
    """Record the job of `make demo`: AdamW in the backward pass, activations in pages, batches of 2 x 128 tokens."""
    from pagert.finetune.model import build_empty, fill
    from pagert.finetune.source import open_source
    from pagert.finetune.text import Windows, tokenise
    from pagert.finetune.training import make_optimizer, repeatable, train

    source = open_source("smollm2")
    config = source.config()
    tokens = tokenise(source.tokenizer(), "kjv", MIB, config.vocab_size)
    windows = Windows(tokens, batch=2, seq=128, seed=0)
    model = build_empty(config)
    device = torch.device("cpu")
    with repeatable(0), job.pager() as pager:
        with pager.trace({"job": job.name}) as trace:
            fill(model, source, device, pager)
            source.close()
            pager.page_(model)
            optimizer = make_optimizer("adamw", model, 2e-5)
            stepping = pager.step_in_backward(optimizer)
            saving = functools.partial(pager.activations, module=model)
            for _ in train(
                model, optimizer, windows.next_batch, device=device, steps=steps, accumulate=1, saving=saving
            ):
                pass
            stepping.remove()
        del model, optimizer, saving
    return trace


def record_made(job: Job, steps: int, build: Callable[[], nn.Module], classes: int) -> pagert.Trace:
    """Record a model made on the spot: fp32, AdamW, random batches to classify."""
    torch.manual_seed(0)
    model = build()
    with job.pager() as pager:
        with pager.trace({"job": job.name}) as trace:
            pager.page_(model)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
            for _ in range(steps):
                if isinstance(model, LanguageModel):
                    batch = torch.randint(classes, (4, 128))
                    targets = torch.randint(classes, (4 * 128,))
                else:
                    batch = torch.randn(256, next(model.parameters()).shape[1])
                    targets = torch.randint(classes, (256,))
                cross_entropy(model(batch).flatten(0, -2), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        del model, optimizer, trained
    return trace


def wide(width: int, layers: int, classes: int) -> nn.Module:
    """Build a few large layers."""
    inner = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*inner, nn.Linear(width, classes))


def made(name: str, mib: int, page_kib: int, build: Callable[[], nn.Module], classes: int) -> Job:
    """Describe a job of a model made on the spot."""
    return Job(
        name, mib * MIB, page_kib << 10, lambda job, steps: record_made(job, steps, build, classes)
    )


def full_jobs() -> list[Job]:
    """Jobs whose state is three to five times the device tier."""
    return [
        Job("smollm2", 512 * MIB, 256 << 10, record_smollm2),
        made("gpt2-like", 128, 64, lambda: LanguageModel(16000, 512, 8), 16000),
        made("wide-mlp", 160, 256, lambda: wide(2048, 8, 1000), 1000),
        made("lora", 64, 64, lambda: adapt(LanguageModel(8000, 512, 12), 8), 8000),
    ]


def smoke_jobs() -> list[Job]:
    """The same shapes, so small that they take a second each."""
    return [
        made("gpt2-like", 4, 4, lambda: LanguageModel(500, 128, 3), 500),
        made("wide-mlp", 4, 4, lambda: wide(256, 6, 10), 10),
        made("lora", 2, 4, lambda: adapt(LanguageModel(500, 128, 4), 4), 500),
    ]
