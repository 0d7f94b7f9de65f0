# SPDX-License-Identifier: Apache-2.0
"""Paged tensors: what an operator does when the bytes of its operands lie in pages."""

from __future__ import annotations

from .paged_tensor import PagedTensor, Resident

__all__ = ["PagedTensor", "Resident"]
