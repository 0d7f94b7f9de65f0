# SPDX-License-Identifier: Apache-2.0
"""A paged tensor held on the device and seen as a plain one, inside a with block."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from pagert._core.operation import Operation
from pagert._core.pump import UPDATE
from pagert.geometry import describe

from .lending import Loan, export_by_aliases, take_back

if TYPE_CHECKING:
    from .region_tensor import RegionTensor

__all__ = ["Resident"]


class Resident:
    """Context in which a paged tensor is held on the device, seen as a plain dense tensor."""

    __slots__ = ("_dense", "_loan", "_mode", "_tensor")

    def __init__(self, tensor: RegionTensor, mode: int) -> None:
        self._tensor = tensor
        self._mode = mode
        self._loan: Loan | None = None
        self._dense: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        if self._loan is not None:
            raise RuntimeError("this resident() context is open already; ask for another one")
        operation = Operation(type(self._tensor), "resident")
        operation.add(self._tensor, self._mode, guarded=True)
        operation.pin()
        self._loan = loan = Loan(operation)
        self._dense = export_by_aliases(loan.lend(operation.dense(self._tensor)))
        return self._dense

    def __exit__(self, *exception: object) -> None:
        if self._loan is None or self._dense is None:
            return
        loan, dense = weakref.ref(self._loan), self._dense
        self._loan = self._dense = None
        take_back(dense)
        if loan() is not None:
            warnings.warn(
                "a view, an array, an export or a graph of the plain tensor that resident() lent for "
                f"{describe(self._tensor)} is still alive after the context: its pages stay pinned on "
                "the device until it is gone; clone what should outlive the context",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._mode == UPDATE:
            torch.autograd.graph.increment_version(self._tensor)
