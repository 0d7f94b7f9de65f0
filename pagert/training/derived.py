# SPDX-License-Identifier: Apache-2.0
"""Weights that PyTorch's older hooks compute before each forward pass and keep as plain attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["without_derived"]


@contextlib.contextmanager
def without_derived(module: torch.nn.Module) -> Iterator[None]:
    """Cut the graphs that lead from derived weights to their parameters; they are computed again after."""
    derived = list(_derived(module))
    for part, name, _ in derived:
        setattr(part, name, getattr(part, name).detach())
    try:
        yield
    finally:
        for part, name, hook in derived:
            setattr(part, name, hook.compute_weight(part))


def _derived(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm) and getattr(part, hook.name).grad_fn is not None:
                yield part, hook.name, hook
