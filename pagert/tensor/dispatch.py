# SPDX-License-Identifier: Apache-2.0
"""The route of each kind of operator, and the dispatcher that takes it there or runs the operator itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert._core.dispatcher import Dispatcher
from pagert._core.operation import Operation
from pagert._core.pump import READ, UPDATE
from pagert.errors import OutOfFrames, UnsupportedOperator
from pagert.geometry import byte_range, describe

from . import factories, lists, opaque, rebinding, streaming, views
from .copying import page
from .ranges import WHOLE_IN_DEVICE
from .traits import Kind, Traits, analyse

if TYPE_CHECKING:
    from .region_tensor import RegionTensor

__all__ = ["make_dispatcher"]


_known: dict[torch._ops.OpOverload, Traits] = {}


def make_dispatcher(cls: type[RegionTensor]) -> Dispatcher:
    """Return what runs operators on paged tensors."""
    return Dispatcher(cls, _known, _analyse, WHOLE_IN_DEVICE)


def _analyse(op: torch._ops.OpOverload) -> Traits:
    traits = analyse(op)
    traits.route = streaming.run_large if traits.product else _ROUTES.get(traits.kind)
    traits.stream = streaming.run
    _known[op] = traits
    return traits


def run_out(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run an operator with out= tensors.

    Their old bytes are kept until the kernel has accepted the call.
    """
    operation = Operation(cls, traits.name)
    if traits.whole:
        _collect_whole(cls, operation, arguments, {})
    else:
        for value in arguments:
            operation.collect(value, READ)
    outs = []
    for name, value in options.items():
        if name in traits.outs and type(value) is cls:
            outs.append(value)
            operation.add(value, UPDATE, guarded=True)
        else:
            operation.collect(value, UPDATE if name in traits.written else READ)
    try:
        operation.pin()
    except OutOfFrames as error:
        return streaming.run(cls, traits, arguments, options, error)
    try:
        try:
            result = traits.op(
                *[operation.dense(value) for value in arguments],
                **{name: operation.dense(value) for name, value in options.items()},
            )
        except RuntimeError as error:
            if "not resizable" not in str(error):
                raise
            given = ", ".join(describe(out) for out in outs)
            raise UnsupportedOperator(
                f"{traits.name}: out= is paged ({given}) and the result is larger; a region has a "
                "fixed size: give an out= of the result's shape"
            ) from error
        for out in outs:
            _follow(cls, out, operation.dense(out))
        return operation.leave(result)
    finally:
        operation.end()


def run_lookup(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run an operator that needs some rows of a table: on their pages alone, or on the whole table."""
    found = streaming.look_up(cls, traits, arguments, options)
    return cls._dispatcher.run(traits, arguments, options) if found is NotImplemented else found


def _collect_whole(
    cls: type[RegionTensor],
    operation: Operation,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    if type(arguments[0]) is cls:
        operation.add(arguments[0], READ, whole=True)
    for value in (*arguments[1:], *options.values()):
        operation.collect(value, READ)


def _follow(cls: type[RegionTensor], out: RegionTensor, dense: torch.Tensor) -> None:
    """Give `out` the shape that the operator gave its dense view."""
    if out.shape == dense.shape and out.stride() == dense.stride():
        return
    out._footprint = None
    if byte_range(out)[1] == 0:
        out._rebind(page(cls, out._runtime, dense))
        return
    with torch._C._DisableTorchDispatch():
        torch.ops.aten.as_strided_.default(out, dense.size(), dense.stride(), out.storage_offset())


def refuse(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Raise with the operator's name."""
    raise UnsupportedOperator(f"{traits.name} cannot run on paged tensors: {traits.reason}")


_ROUTES = {
    Kind.LOOKUP: run_lookup,
    Kind.OUT: run_out,
    Kind.VIEW: views.run_view,
    Kind.RESHAPE: views.run_reshape,
    Kind.RESIZE: views.run_resize,
    Kind.COMPOSITE: views.run_composite,
    Kind.ZEROS: factories.run_zeros,
    Kind.FILLED: factories.run_filled,
    Kind.COPY: factories.run_copy,
    Kind.ASSIGN: factories.run_assign,
    Kind.SET: rebinding.run_set,
    Kind.LIST: lists.run_list,
    Kind.OPAQUE: opaque.run_opaque,
    Kind.STORAGE: opaque.run_storage,
    Kind.REFUSED: refuse,
}
