# SPDX-License-Identifier: Apache-2.0
"""What the schema of an operator says about its operands, analysed once and kept.

A plan holds everything that the hot path needs to know about an operator, so that a call looks at
its operands only. It knows no tensor class and no pump.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Kind", "Plan", "analyse"]


class Kind(enum.Enum):
    """How an operator runs on paged operands."""

    DENSE = "pin, dense views, run, unpin"
    LOOKUP = "as DENSE, and of a large table only the pages of some rows are needed"
    OUT = "as DENSE, and the result may ask for another shape of its out= tensors"
    VIEW = "another look at the same bytes: geometry only"
    RESHAPE = "the tensor itself gets another geometry over the same bytes"
    RESIZE = "as RESHAPE, and the bytes may not suffice"
    COMPOSITE = "decomposes into operators that come here by themselves"
    ZEROS = "a new tensor that is never written: zeros_like, empty_like, ..."
    FILLED = "a new tensor whose every byte is written: ones_like, rand_like, ..."
    COPY = "a new tensor with the operand's values: clone, _to_copy"
    ASSIGN = "copy_"
    LIST = "the same operator on each index of its lists"
    REFUSED = "cannot run on pages"


class Plan:
    """What is known of one operator. Immutable once `route` is set by the dispatch."""

    __slots__ = (
        "argument_names",
        "call",
        "deferrable",
        "gradients",
        "kind",
        "list_names",
        "name",
        "op",
        "outgrows",
        "outs",
        "overwrites",
        "reason",
        "route",
        "short",
        "whole",
        "written",
    )

    op: torch._ops.OpOverload
    name: str
    kind: Kind
    argument_names: tuple[str, ...]
    written: frozenset[int | str]  # arguments that the operator writes, by position and by name
    gradients: int | None  # the argument that an optimizer's kernel writes only to unscale it
    outs: tuple[str, ...]  # keyword-only arguments that are written and returned: out=
    overwrites: Callable[[Sequence[Any], Mapping[str, Any]], bool] | None
    list_names: tuple[str, ...]  # arguments that hold one element for each index of a list operator
    whole: bool  # it looks at the whole storage of its first operand, not only at its elements
    reason: str  # why the operator is refused, and the remedy
    route: Callable[..., Any]
    call: Callable[..., Any]  # the operator below its Python wrapper
    short: str | None  # the short way that its calls may take: "dense", "list", "product", "view"
    outgrows: Callable[[Sequence[Any]], bool]  # of a product: its result is larger than the device tier
    deferrable: bool  # an optimizer's kernel: an index of its lists may run later, and in ranges


# Operators that return an alias of their operand without saying so in their schema.
_SILENT_VIEWS = frozenset(
    {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
)

_ZEROS = frozenset({"zeros_like", "empty_like", "new_zeros", "new_empty", "new_empty_strided"})
_FILLED = frozenset(
    {"ones_like", "full_like", "new_ones", "new_full", "rand_like", "randn_like", "randint_like"}
)
_COPIES = frozenset({"clone", "_to_copy"})
SMALL_ELEMENTS = 16384  # a product of fewer elements is plain in any case: there is nothing to ask then
# Their results may be much larger than their operands.
_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
_DEFERRABLE = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
_LIST_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")

# Operators on some rows, or elements, of their first operand; and the gradient of one.
_LOOKUPS = frozenset(
    {
        "embedding",
        "embedding_dense_backward",
        "embedding_renorm_",
        "gather",
        "index",
        "index_select",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "take",
    }
)

# Operators that clone the whole storage of their operand, or count an offset from its start.
_WHOLE_STORAGE = frozenset(
    {"as_strided_copy", "as_strided_scatter", "slice_scatter", "select_scatter", "diagonal_scatter"}
)

# Statistics that normalisation updates in place, in some schemas without saying so.
_SILENTLY_WRITTEN = frozenset({"running_mean", "running_var"})

_USE_RESIDENT = "use `with t.resident() as dense:` and give it the plain tensor"
_REFUSED = {
    "set_": "a paged tensor's storage is its pages; assign `t.data = other` instead",
    "record_stream": "the pager orders the reuse of device memory behind the streams by itself",
    "_pin_memory": f"its memory belongs to the pager; {_USE_RESIDENT}",
    "_resize_output_": "the storage of a paged tensor has a fixed size",
    "_nested_view_from_buffer": "nested tensors cannot be paged",
    "_nested_view_from_jagged": "nested tensors cannot be paged",
    "_copy_from": "an operator of one backend's own; use copy_",
    "_copy_from_and_resize": "an operator of one backend's own; use copy_",
    "_cudnn_rnn_flatten_weight": "it moves parameters into one buffer of its own",
}

# Random numbers that fill their tensor. Their arguments are tried on a tensor without elements
# first, because an argument that is refused after its pages were given up would lose the old
# values.
_RANDOM = frozenset(
    {"normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}
)
_FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def _fill_overwrites(
    op: torch._ops.OpOverload,
) -> Callable[[Sequence[Any], Mapping[str, Any]], bool]:
    def overwrites(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
        value = arguments[1] if len(arguments) > 1 else options.get("value")
        if isinstance(value, torch.Tensor):
            return False
        # Raises what the real call would raise. One element would take a way without checks.
        op(torch.empty(2, dtype=arguments[0].dtype), value)
        return True

    return overwrites


def _random_overwrites(
    op: torch._ops.OpOverload,
) -> Callable[[Sequence[Any], Mapping[str, Any]], bool]:
    def overwrites(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
        if arguments[0].dtype not in _FLOATS or options.get("generator") is not None:
            return False
        op(torch.empty(0, dtype=arguments[0].dtype), *arguments[1:], **options)
        return True

    return overwrites


def _always(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    return True


def _list_copy_overwrites(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    targets, sources = arguments[0], arguments[1]
    return all(
        target.shape == source.shape and source.layout is torch.strided
        for target, source in zip(targets, sources, strict=False)
    )


def _overwrites(op: torch._ops.OpOverload, base: str) -> Callable[..., bool] | None:
    if base in ("zero_", "_foreach_zero_"):
        return _always
    if base == "fill_":
        return _fill_overwrites(op)
    if base in _RANDOM:
        return _random_overwrites(op)
    if base == "_foreach_copy_":
        return _list_copy_overwrites
    return None


def _outgrows(arguments: Sequence[Any]) -> bool:
    left, right = arguments[-2], arguments[-1]
    axes = left.dim()
    if axes < 2 or right.dim() != axes:
        return False  # the kernel says what is wrong
    element_count = left.size(0) * right.size(-1)
    if axes > 2:
        element_count *= left.size(1)
    if element_count < SMALL_ELEMENTS:
        return False
    paged: Any = next((one for one in arguments if hasattr(one, "_runtime")), None)
    return paged is not None and bool(element_count * left.itemsize > paged._runtime.storage.nbytes())


def _is_list(argument: Any) -> bool:
    kind = str(argument.type)
    # `scalars` as one tensor holds one value for each index as well.
    return (
        kind in ("List[Tensor]", "List[Optional[Tensor]]", "List[number]")
        or argument.name == "scalars"
    )


def _kind(op: torch._ops.OpOverload, base: str, outs: tuple[str, ...]) -> Kind:
    aten = op.namespace == "aten"
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )
    if aten and base in _REFUSED:
        return Kind.REFUSED
    if outs:
        return Kind.OUT
    if aten and base in ("resize_", "resize_as_"):
        return Kind.RESIZE
    if op.is_view or torch.Tag.inplace_view in op.tags:
        if composite:  # `to`, `reshape`, `contiguous` may copy: inner operators decide
            return Kind.COMPOSITE
        return Kind.VIEW if op.is_view else Kind.RESHAPE
    if not aten:
        return Kind.DENSE
    if base in _SILENT_VIEWS:
        return Kind.VIEW
    if base in _ZEROS:
        return Kind.ZEROS
    if base in _FILLED:
        return Kind.FILLED
    if base in _COPIES:
        return Kind.COPY
    if base == "copy_":
        return Kind.ASSIGN
    if base in _LOOKUPS:
        return Kind.LOOKUP
    first = op._schema.arguments[0] if op._schema.arguments else None
    lists = [argument for argument in op._schema.arguments if str(argument.type) == "List[Tensor]"]
    if first is not None and lists and base.startswith(_LIST_PREFIXES):
        return Kind.LIST
    return Kind.DENSE


def _short_way(plan: Plan) -> str | None:
    if plan.kind is Kind.VIEW:
        return "view"
    if plan.overwrites is not None or plan.whole:
        return None
    if plan.kind is Kind.LIST:
        # New tensors of a list are paged, and that is not simple.
        return None if plan.op._schema.returns else "list"
    if plan.name in _PRODUCTS:
        return "product"
    return "dense" if plan.kind is Kind.DENSE else None


def analyse(op: torch._ops.OpOverload) -> Plan:
    """Build the plan of an operator from its schema."""
    schema = op._schema
    plan = Plan()
    plan.op = op
    base = schema.name.rpartition("::")[2]
    plan.name = str(op)
    plan.argument_names = tuple(argument.name for argument in schema.arguments)
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.name in _SILENTLY_WRITTEN or (
            argument.alias_info is not None and argument.alias_info.is_write
        ):
            written.update((position, argument.name))
    plan.written = frozenset(written)
    plan.outs = tuple(
        argument.name
        for argument in schema.arguments
        if argument.kwarg_only and argument.name in written
    )
    plan.gradients = None
    if base.startswith("_fused_") and "grads" in plan.argument_names:
        plan.gradients = plan.argument_names.index("grads")
    plan.kind = _kind(op, base, plan.outs)
    plan.overwrites = _overwrites(op, base) if op.namespace == "aten" else None
    plan.list_names = ()
    if plan.kind is Kind.LIST:
        plan.list_names = tuple(
            argument.name for argument in schema.arguments if _is_list(argument)
        )
    plan.whole = op.namespace == "aten" and base in _WHOLE_STORAGE
    plan.reason = _REFUSED.get(base, "")
    plan.call = op._op
    plan.outgrows = _outgrows
    plan.short = _short_way(plan)
    plan.deferrable = plan.kind is Kind.LIST and base in _DEFERRABLE
    return plan
