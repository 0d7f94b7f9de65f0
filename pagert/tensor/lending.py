# SPDX-License-Identifier: Apache-2.0
"""Pinned bytes that are lent as plain tensors, and stay pinned until nothing looks at them any more.

Views, NumPy arrays, DLPack exports and graphs may outlive the block or the call that a tensor was lent for. Each
of them holds the storage of what was lent, the storage holds the loan, and the loan holds the pin.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy
import torch

if TYPE_CHECKING:
    from pagert._core.operation import Operation

__all__ = ["Loan", "export_by_aliases", "take_back"]


class Loan:
    """The pin of some operands. It is released when the loan and all that looks at its bytes are gone."""

    __slots__ = ("__weakref__", "_operation")

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def lend(self, dense: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor like a guarded dense view of one of the operands. It cannot grow either."""
        window = dense.untyped_storage()
        if window.nbytes() == 0:
            return dense
        memory = torch.from_numpy(numpy.asarray(_Memory(self, window.data_ptr(), window.nbytes())))
        lent = torch.empty(0, dtype=dense.dtype)
        lent.set_(memory.untyped_storage(), dense.storage_offset(), dense.size(), dense.stride())
        torch._C._set_neg(lent, dense.is_neg())
        if dense.is_complex():
            torch._C._set_conj(lent, dense.is_conj())
        return lent

    def __del__(self) -> None:
        self._operation.end()


class _Memory:
    """Bytes of the arena, for NumPy. Whatever NumPy and PyTorch make of it keeps the loan."""

    __slots__ = ("__array_interface__", "_loan")

    def __init__(self, loan: Loan, address: int, size_bytes: int) -> None:
        self._loan = loan
        self.__array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def take_back(lent: torch.Tensor) -> None:
    """Make a lent tensor an empty one. What was derived from it stays what it is."""
    # Not `lent.data = ...`, which would exchange what graphs and exports hold of it as well.
    torch._C._swap_tensor_impl(lent, torch.empty(0, dtype=lent.dtype))


def export_by_aliases(lent: torch.Tensor) -> torch.Tensor:
    """Let a tensor that will be taken back hand out its memory through other tensors, which will not.

    An array of NumPy holds the Python object that made it, and one that was taken back holds nothing.
    """
    exports = _Exports(lent)
    made: Any = lent
    made.numpy, made.__dlpack__ = exports.numpy, exports.dlpack
    # Copies and pickles are of the tensor and not of what was added here.
    made.__deepcopy__, made.__reduce_ex__ = exports.deepcopy, exports.reduce
    return lent


class _Exports:
    __slots__ = ("_lent",)

    def __init__(self, lent: torch.Tensor) -> None:
        self._lent = weakref.ref(lent)

    def _alias(self) -> torch.Tensor:
        lent = self._lent()
        assert lent is not None, "its methods are attributes of the tensor"
        return lent.view_as(lent) if lent.requires_grad else lent.detach()

    def numpy(self, *, force: bool = False) -> numpy.ndarray:
        return self._alias().numpy(force=force)

    def dlpack(self, *arguments: Any, **options: Any) -> Any:
        return self._alias().__dlpack__(*arguments, **options)

    def deepcopy(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._alias().__deepcopy__(memo)

    def reduce(self, protocol: Any) -> Any:
        return self._alias().__reduce_ex__(protocol)
