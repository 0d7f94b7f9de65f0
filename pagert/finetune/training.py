# SPDX-License-Identifier: Apache-2.0
"""The training loop. It knows nothing of pages: paged and unpaged runs take the same lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

__all__ = ["evaluate", "make_optimizer", "repeatable", "train"]

_FILL = "fill_uninitialized_memory"  # a property of the module that type checkers do not see


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Let the same seed give the same bits on the same machine, inside."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        getattr(torch.utils.deterministic, _FILL),
    )
    # cuBLAS reads this when it starts; without it torch refuses to be deterministic on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    # Nobody reads what was never written, and filling it would touch pages for nothing.
    setattr(torch.utils.deterministic, _FILL, False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        setattr(torch.utils.deterministic, _FILL, before[2])


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Make an optimizer of torch.optim in its fused implementation."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, fused=True)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, fused=True)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    next_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    device: torch.device,
    steps: int,
    accumulate: int,
    saving: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[tuple[float, float, int]]:
    """Train, and yield loss, seconds and tokens of each step once it is done.

    Each forward pass runs in the context that `saving` gives. The loss of a step is the mean over its batches, before
    the update.
    """
    model.train()
    for _ in range(steps):
        started = time.perf_counter()
        total, tokens = 0.0, 0
        for _ in range(accumulate):
            inputs, targets = next_batch()
            total += _backward(model, inputs.to(device), targets.to(device), 1.0 / accumulate, saving)
            tokens += inputs.numel()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait_for(device)
        yield total / accumulate, time.perf_counter() - started, tokens


def evaluate(
    model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> float:
    """Compute the mean loss per token over batches."""
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for inputs, targets in batches:
            total += float(_loss(model, inputs.to(device), targets.to(device))) * targets.numel()
            tokens += targets.numel()
    return total / tokens


def _backward(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    weight: float,
    saving: Callable[[], AbstractContextManager[Any]],
) -> float:
    with saving():
        loss = _loss(model, inputs, targets)
    (loss * weight if weight != 1.0 else loss).backward()
    return float(loss.detach())


def _loss(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # Windows carry their targets, so the logits need no shifted copy: they are the largest
    # activation by far, and they are gone as soon as their logarithms are there.
    logits = model(input_ids=inputs, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
