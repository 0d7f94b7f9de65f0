# SPDX-License-Identifier: Apache-2.0
"""The way of an operator on paged tensors: its plan is looked up, the plan's route runs it.

Autograd, autocast, vmap and the decomposition of composite operators happen above; what arrives
here is what a kernel would get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert._core.operation import Dispatcher
from pagert._core.pump import OVERWRITE, READ, UPDATE
from pagert.errors import OutOfFrames, UnsupportedOperator
from pagert.geometry import byte_range, describe

from . import factories, lists, streaming, views
from .operands import Operands, flat, geometry, leave
from .plan import Kind, Plan, analyse

if TYPE_CHECKING:
    from .paged_tensor import PagedTensor

__all__ = ["make_dispatcher", "run_dense"]


_plans: dict[torch._ops.OpOverload, Plan] = {}


def make_dispatcher(cls: type[PagedTensor]) -> Dispatcher:
    """Return what runs operators on paged tensors: the short way in Cython, or the routes below."""
    return Dispatcher(
        cls,
        _plans,
        _make_plan,
        geometry,
        flat,
        functools.partial(leave, cls),
        lists.WHOLE_IN_DEVICE,
    )


def _make_plan(op: torch._ops.OpOverload) -> Plan:
    plan = analyse(op)
    plan.route = _ROUTES[plan.kind]
    _plans[op] = plan
    return plan


def run_dense(
    cls: type[PagedTensor],
    plan: Plan,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    call: Callable[..., Any] | None = None,
) -> Any:
    """Pin every paged operand, run the operator, or `call` in its place, on dense views, let go."""
    call = call or plan.op
    if plan.short == "product" and plan.outgrows(arguments):
        return streaming.run_large(cls, plan, arguments, options)
    operands = Operands(cls, plan.name)
    written = plan.written
    if plan.whole:
        _collect_whole(cls, operands, arguments, options)
    elif not written:
        for value in arguments:
            operands.collect(value, READ)
        for value in options.values():
            operands.collect(value, READ)
    else:
        write = UPDATE
        if plan.overwrites is not None and plan.overwrites(arguments, options):
            write = OVERWRITE
        unscaled = plan.gradients if options.get("grad_scale") is None else None
        for position, value in enumerate(arguments):
            reads = position not in written or position == unscaled
            operands.collect(value, READ if reads else write)
        for name, value in options.items():
            operands.collect(value, write if name in written else READ)
    try:
        operands.pin()
    except OutOfFrames as error:
        if call is not plan.op:
            raise
        return streaming.run(cls, plan, arguments, options, error)
    try:
        dense = [operands.dense(value) for value in arguments]
        if options:
            dense_options = {name: operands.dense(value) for name, value in options.items()}
            return operands.leave(call(*dense, **dense_options))
        return operands.leave(call(*dense))
    finally:
        operands.release()


def run_out(
    cls: type[PagedTensor], plan: Plan, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run an operator with out= tensors.

    Their old bytes are kept until the kernel has accepted the call.
    """
    operands = Operands(cls, plan.name)
    if plan.whole:
        _collect_whole(cls, operands, arguments, {})
    else:
        for value in arguments:
            operands.collect(value, READ)
    outs = []
    for name, value in options.items():
        if name in plan.outs and type(value) is cls:
            outs.append(value)
            operands.add(value, UPDATE, guarded=True)
        else:
            operands.collect(value, UPDATE if name in plan.written else READ)
    try:
        operands.pin()
    except OutOfFrames as error:
        return streaming.run(cls, plan, arguments, options, error)
    try:
        try:
            result = plan.op(
                *[operands.dense(value) for value in arguments],
                **{name: operands.dense(value) for name, value in options.items()},
            )
        except RuntimeError as error:
            if "not resizable" not in str(error):
                raise
            given = ", ".join(describe(out) for out in outs)
            raise UnsupportedOperator(
                f"{plan.name}: out= is paged ({given}) and the result is larger; a region has a "
                "fixed size: give an out= of the result's shape"
            ) from error
        for out in outs:
            _follow(cls, out, operands.dense(out))
        return operands.leave(result)
    finally:
        operands.release()


def run_lookup(
    cls: type[PagedTensor], plan: Plan, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run an operator that needs some rows of a table: on their pages alone, or on the whole table."""
    found = streaming.look_up(cls, plan, arguments, options)
    return run_dense(cls, plan, arguments, options) if found is NotImplemented else found


def _collect_whole(
    cls: type[PagedTensor],
    operands: Operands,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    if type(arguments[0]) is cls:
        operands.add(arguments[0], READ, whole=True)
    for value in (*arguments[1:], *options.values()):
        operands.collect(value, READ)


def _follow(cls: type[PagedTensor], out: PagedTensor, dense: torch.Tensor) -> None:
    """Give `out` the shape that the operator gave its dense view."""
    if out.shape == dense.shape and out.stride() == dense.stride():
        return
    out._footprint = None
    if byte_range(out)[1] == 0:
        out._rebind(cls._page(out._runtime, dense))
        return
    with torch._C._DisableTorchDispatch():
        torch.ops.aten.as_strided_.default(out, dense.size(), dense.stride(), out.storage_offset())


def refuse(
    cls: type[PagedTensor], plan: Plan, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Raise with the operator's name."""
    raise UnsupportedOperator(f"{plan.name} cannot run on paged tensors: {plan.reason}")


_ROUTES = {
    Kind.DENSE: run_dense,
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
    Kind.LIST: lists.run_list,
    Kind.REFUSED: refuse,
}
