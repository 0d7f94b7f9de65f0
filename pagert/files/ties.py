# SPDX-License-Identifier: Apache-2.0
"""Which tensors are one and the same under several names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["identity", "tied"]


def identity(tensor: torch.Tensor) -> object:
    """Return what is equal for two tensors that are the same elements, and only for these.

    Valid while the tensors live. Views of one storage that differ are different tensors.
    """
    if tensor.numel() == 0 or tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return id(tensor)
    storage = torch._C.TensorBase.untyped_storage(tensor)
    return (
        storage._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_neg(),
        tensor.is_conj(),
    )


def tied(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Group the names of each tensor, in their order."""
    groups: dict[object, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(identity(tensor), []).append(name)
    return list(groups.values())
