# SPDX-License-Identifier: Apache-2.0
"""Operators that are taken at less, or at more, than the word of their schema.

Operators that others register may write what their schema does not say, and keep what they are given. Operators that
only ask about a tensor's storage get no bytes at all.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert._core.footprint import geometry
from pagert._core.operation import Operation
from pagert._core.pump import UPDATE
from pagert.errors import UnsupportedOperator
from pagert.geometry import describe

from .lending import Loan, take_back

if TYPE_CHECKING:
    from .region_tensor import RegionTensor
    from .traits import Traits

__all__ = ["run_opaque", "run_storage"]


def run_opaque(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run an operator that may write each of its operands, whatever its schema says.

    Every paged operand is pinned for update: a writeback too many, never a value lost. The pin ends
    with the call, or later where the operator has kept something of what it was lent, as the work
    that a collective returns does until it is done.

    Raises
    ------
    UnsupportedOperator
        The operator gave an operand another shape or other memory, or tried to make it larger.
    """
    operation = Operation(cls, traits.name)
    found: dict[int, RegionTensor] = {}
    _paged(cls, (*arguments, *options.values()), found)
    paged = list(found.values())
    for tensor in paged:
        operation.add(tensor, UPDATE, guarded=True)
    operation.pin()
    loan = Loan(operation)
    kept = weakref.ref(loan)
    lent = {id(tensor): loan.lend(operation.dense(tensor)) for tensor in paged}
    del loan
    try:
        result = _call(cls, traits, operation, paged, lent, arguments, options)
    except BaseException:
        for one in lent.values():  # frames of the traceback look at them for as long as it lives
            take_back(one)
        raise
    if traits.lasting and _is_over(traits, arguments, options, result):
        operation.end()  # a thread of the process group lets go of the work a moment later
    lent.clear()
    del operation
    if kept() is not None and not traits.lasting:
        warnings.warn(
            f"{traits.name} kept a view of a paged operand, or returned one in a form that is not a "
            "tensor: the pages of all its operands stay pinned on the device until it is gone",
            RuntimeWarning,
            stacklevel=2,
        )
    return result


def _paged(cls: type[RegionTensor], value: Any, found: dict[int, RegionTensor]) -> None:
    if type(value) is cls:
        found[id(value)] = value
    elif isinstance(value, (list, tuple)):
        for item in value:
            _paged(cls, item, found)


def _is_over(
    traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any], result: Any
) -> bool:
    """Wait for a collective whose caller would do so at once. False where it goes on."""
    named = dict(zip(traits.argument_names, arguments, strict=False)) | dict(options)
    if named.get("async_op", True) is not False:
        return False
    for item in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(item, torch.ScriptObject):
            work: Any = item
            work.wait()
            return True
    return False


def _call(
    cls: type[RegionTensor],
    traits: Traits,
    operation: Operation,
    paged: Sequence[RegionTensor],
    lent: dict[int, torch.Tensor],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    def dense(value: Any) -> Any:
        if type(value) is cls:
            return lent[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)([dense(item) for item in value])
        return value

    addresses = [lent[id(tensor)].data_ptr() for tensor in paged]
    try:
        result = traits.op(
            *[dense(value) for value in arguments],
            **{name: dense(value) for name, value in options.items()},
        )
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        given = ", ".join(describe(tensor) for tensor in paged)
        raise UnsupportedOperator(
            f"{traits.name}: it tried to enlarge one of its paged operands ({given}), whose regions "
            "have fixed sizes; give it a tensor of the final size"
        ) from error
    for tensor, address in zip(paged, addresses, strict=True):
        one = lent[id(tensor)]
        if (one.data_ptr(), one.size(), one.stride()) != (address, tensor.size(), tensor.stride()):
            raise UnsupportedOperator(
                f"{traits.name}: it gave a paged operand ({describe(tensor)}) the shape {tuple(one.shape)} "
                "or other memory; give it a plain tensor and copy the result back"
            )
    return _leave(result, paged, lent, operation)


def _leave(
    result: Any,
    paged: Sequence[RegionTensor],
    lent: dict[int, torch.Tensor],
    operation: Operation,
) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)([_leave(item, paged, lent, operation) for item in result])
    for tensor in paged:
        if result is lent[id(tensor)]:
            return tensor
    return operation.leave(result)


def run_storage(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run an operator that asks about geometry and the size of storages. Nothing is pinned."""

    def look(value: Any) -> Any:
        return geometry(value) if type(value) is cls else value

    return traits.op(
        *[look(value) for value in arguments],
        **{name: look(value) for name, value in options.items()},
    )
