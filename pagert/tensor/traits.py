# SPDX-License-Identifier: Apache-2.0
"""What the schema of an operator says about its operands, analysed once and kept.

Traits hold everything that the hot path needs to know about an operator, so that a call looks at
its operands only. They know no tensor class and no pump.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pagert._core.dispatcher import ROUTE, RUN, SMALL, VIEW, Handling

__all__ = ["Kind", "Traits", "analyse"]


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
    SET = "the tensor itself becomes another look at bytes that exist"
    LIST = "the same operator on each index of its lists"
    OPAQUE = "of others: may write any operand, whatever its schema says"
    STORAGE = "asks about geometry and the size of storages, not about bytes"
    REFUSED = "cannot run on pages"


class Traits(Handling):
    """What is known of one operator: beside what every call needs, what its route does.

    Immutable once `route` is set by the dispatch.
    """

    op: torch._ops.OpOverload
    kind: Kind
    argument_names: tuple[str, ...]
    outs: tuple[str, ...]  # keyword-only arguments that are written and returned: out=
    list_names: tuple[str, ...]  # arguments that hold one element for each index of a list operator
    lasting: bool  # it may use its operands after the call, and holds them until it is done
    reason: str  # why the operator is refused, and the remedy
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
# Their results may be much larger than their operands.
_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
_DEFERRABLE = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
_LIST_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")

# Whose schemas say all that their operators write, and whose operators keep nothing.
_TRUSTED = frozenset({"aten", "prims"})
# Collectives go on after the call has returned. Those of c10d return a `Work` that holds their operands until it is
# done. The others know the work that writes a tensor by the tensor's storage, which for a paged one is there for the
# call only: those of them that read and return new tensors are right, as the work behind them holds what it reads.
_COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_FUNCTIONAL_REFUSED = frozenset({"wait_tensor", "irecv", "isend", "batch_p2p_ops"})
_UNKNOWN_COLLECTIVE = frozenset({"c10d_functional", "symm_mem", "_dtensor"})

# Forward-mode automatic differentiation compares the layouts of a tensor and its tangent, storages included.
_STORAGE = frozenset({"_has_same_storage_numel", "_new_zeros_with_same_feature_meta"})

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

# Statistics that normalisation updates in place, and scratch memory that oneDNN's recurrent layers leave for their
# backward pass, which works in it; in some schemas without saying so.
_SILENTLY_WRITTEN = frozenset({"running_mean", "running_var", "workspace"})

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


def _is_list(argument: Any) -> bool:
    kind = str(argument.type)
    # `scalars` as one tensor holds one value for each index as well.
    return (
        kind in ("List[Tensor]", "List[Optional[Tensor]]", "List[number]")
        or argument.name == "scalars"
    )


def _reason(op: torch._ops.OpOverload, base: str) -> str:
    """Return why an operator is refused, or nothing."""
    if op.namespace in _UNKNOWN_COLLECTIVE or (
        op.namespace.startswith("_c10d_functional")
        and (base in _FUNCTIONAL_REFUSED or base.endswith(("_", "_out")))
    ):
        return (
            "this collective works on its operands after the call has returned, and nothing says "
            "when it is done; use `with t.resident() as dense:` around it and its wait, and give it "
            "the plain tensor"
        )
    return _REFUSED.get(base, "") if op.namespace == "aten" else ""


def _kind(op: torch._ops.OpOverload, base: str, outs: tuple[str, ...]) -> Kind:
    aten = op.namespace == "aten"
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )
    if aten and op is torch.ops.aten.set_.source_Tensor:
        return Kind.SET
    if _reason(op, base):
        return Kind.REFUSED
    if op.namespace not in _TRUSTED:
        return Kind.OPAQUE
    if aten and base in _STORAGE:
        return Kind.STORAGE
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


def _way(traits: Traits) -> int:
    if traits.kind is Kind.VIEW:
        return VIEW
    if traits.kind is Kind.LIST:
        # New tensors of a list are paged, which is the route's matter.
        return ROUTE if traits.op._schema.returns else SMALL
    if traits.kind is Kind.LOOKUP:
        # A gradient's operands say nothing of its size.
        return ROUTE if traits.name == "aten.embedding_dense_backward.default" else SMALL
    return RUN if traits.kind is Kind.DENSE else ROUTE


def analyse(op: torch._ops.OpOverload) -> Traits:
    """Find the traits of an operator in its schema."""
    schema = op._schema
    traits = Traits()
    traits.op = op
    base = schema.name.rpartition("::")[2]
    traits.name = str(op)
    traits.argument_names = tuple(argument.name for argument in schema.arguments)
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.name in _SILENTLY_WRITTEN or (
            argument.alias_info is not None and argument.alias_info.is_write
        ):
            written.update((position, argument.name))
    traits.written = frozenset(written)
    traits.outs = tuple(
        argument.name
        for argument in schema.arguments
        if argument.kwarg_only and argument.name in written
    )
    traits.gradients = None
    if base.startswith("_fused_") and "grads" in traits.argument_names:
        traits.gradients = traits.argument_names.index("grads")
    traits.kind = _kind(op, base, traits.outs)
    traits.overwrites = _overwrites(op, base) if op.namespace == "aten" else None
    traits.list_names = ()
    if traits.kind is Kind.LIST:
        traits.list_names = tuple(
            argument.name for argument in schema.arguments if _is_list(argument)
        )
    traits.whole = op.namespace == "aten" and base in _WHOLE_STORAGE
    traits.reason = _reason(op, base)
    traits.lasting = op.namespace in _COLLECTIVE
    traits.call = op._op
    traits.way = _way(traits)
    traits.product = traits.name in _PRODUCTS
    traits.route = traits.stream = None
    traits.deferrable = traits.kind is Kind.LIST and base in _DEFERRABLE
    return traits
