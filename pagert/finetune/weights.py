# SPDX-License-Identifier: Apache-2.0
"""Read weights out of pages, one tensor at a time: their bytes, and a digest of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pagert.finetune.model import stored_tensors

__all__ = ["dense_bytes", "digests"]


@contextmanager
def dense_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Give the bytes of a tensor, paged or plain, in row-major order. Valid only inside."""
    resident = getattr(tensor, "resident", None)
    if resident is None:
        yield _bytes_of(tensor)
        return
    with resident("read") as dense:
        view = _bytes_of(dense)
        try:
            yield view
        finally:
            view.release()


def _bytes_of(dense: torch.Tensor) -> memoryview:
    flat = dense.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def digests(model: nn.Module) -> dict[str, str]:
    """Compute a digest of the bytes of every stored tensor; equal digests mean equal bits.

    Returns
    -------
    dict
        Name to the hexadecimal BLAKE2b (16 bytes) of shape, dtype and bytes.
    """
    result = {}
    for name, tensor in stored_tensors(model):
        digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
        with dense_bytes(tensor) as view:
            digest.update(view)
        result[name] = digest.hexdigest()
    return result
