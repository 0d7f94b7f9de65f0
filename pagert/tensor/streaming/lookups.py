# SPDX-License-Identifier: Apache-2.0
"""Operators that need a few rows of a large table: only the pages of these rows are pinned.

The rows are copied together into a small plain table, on which the operator itself runs, with indices that point
there. What it writes goes back to the rows. So the arithmetic is the operator's own, and bitwise the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert.errors import OutOfFrames
from pagert.geometry import byte_range, is_dense

from ..ranges import WHOLE_IN_DEVICE, cut, share_bytes
from . import derivatives, elements
from .call import Call
from .table import gather, loaded, scatter, spread

if TYPE_CHECKING:
    from ..region_tensor import RegionTensor
    from ..traits import Traits

__all__ = ["NAMES", "look_up", "run"]

_READERS = frozenset({"embedding", "index_select", "index"})
_WRITERS = frozenset(
    {"embedding_renorm_", "index_add_", "index_copy_", "index_fill_", "index_put_", "_index_put_impl_"}
)
_COPIERS = frozenset({"index_add", "index_copy", "index_fill", "index_put"})
NAMES = _READERS | _WRITERS | _COPIERS | {"embedding_dense_backward"}


def look_up(cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Run a lookup on the pages of its rows, or return NotImplemented where that gains nothing.

    It gains something for tables that take more than a quarter of the device tier, if the rows lie on at most half of
    the table's pages, or the table does not fit.
    """
    base = traits.name.split(".")[1]
    table = arguments[0]
    if base == "embedding_dense_backward":
        runtime = next(one._runtime for one in arguments if type(one) is cls)
        size_bytes = arguments[2] * arguments[0].size(-1) * arguments[0].itemsize
        if size_bytes <= share_bytes(runtime, WHOLE_IN_DEVICE):
            return NotImplemented
    elif type(table) is not cls or byte_range(table)[1] <= share_bytes(table._runtime, WHOLE_IN_DEVICE):
        return NotImplemented
    call = Call(cls, traits, arguments, options, OutOfFrames("its operands do not fit the device tier together"))
    found = elements.try_run(call) if base in elements.NAMES else _run(call, base)
    return found if found is NotImplemented else derivatives.follow(call, found)


def run(call: Call) -> Any:
    """Run the call on the rows that it needs. Blocks until they were fetched."""
    found = _run(call, call.traits.name.split(".")[1])
    if found is NotImplemented:
        raise call.refuse("it runs by rows where whole rows along the first axis are looked up, or single elements")
    return found


def _run(call: Call, base: str) -> Any:
    if base == "embedding_dense_backward":
        return _embedding_backward(call)
    if base in _COPIERS:
        if type(call.arguments[0]) is not call.cls:
            return NotImplemented
        copied = call.arguments[0].clone()
        packet = getattr(torch.ops.aten, f"{base}_")
        return getattr(packet, call.traits.op._overloadname)(copied, *call.arguments[1:], **call.options)
    values = call.named()
    table = values["self"] if "self" in values else values["weight"]
    if base in ("index", "index_put_", "_index_put_impl_") and _is_mask(call, values):
        return _masked(call, base, values)
    position, index = _index(call, base, values)
    if index is None or type(table) is not call.cls or not _has_rows(table):
        return NotImplemented
    index = _checked(call, base, loaded(index), table.size(0))
    if base in _WRITERS:
        return _write(call, base, table, position, index)
    size_bytes = byte_range(table)[1]
    if size_bytes <= call.runtime.storage.nbytes() and spread(call, table, index) > size_bytes // 2:
        return NotImplemented  # most of the table: at once
    return _read(call, table, position, index)


def _is_mask(call: Call, values: dict[str, Any]) -> bool:
    """Whether the index is one mask over the first axes, of a table that does not fit."""
    mask = values["indices"][0]
    return (
        len(values["indices"]) == 1
        and mask is not None
        and mask.dtype is torch.bool
        and mask.dim() > 0
        and mask.shape == values["self"].shape[: mask.dim()]
        and call.pages_bytes(call.paged) > call.runtime.storage.nbytes()
    )


def _masked(call: Call, base: str, values: dict[str, Any]) -> Any:
    """Read block by block where a mask is set, or fill there with one value."""
    table, mask = values["self"], values["indices"][0]
    if base != "index":
        given = values["values"]
        if given.numel() != 1 or values["accumulate"] or given.dtype is not table.dtype:
            return NotImplemented
        return table.masked_fill_(mask.view(*mask.size(), *[1] * (table.dim() - mask.dim())), given.reshape(()))
    length = table.size(0)
    step = call.step(length, lambda step: call.cost([table[:step], mask[:step]]))
    parts = [call.near(table[start:stop])[call.near(mask[start:stop])] for start, stop in cut(length, step)]
    count = sum(part.size(0) for part in parts)
    result = call.result((count, *table.size()[mask.dim() :]), table.dtype)
    start = 0
    for part in parts:
        call.place(result[start : start + part.size(0)], part)
        start += part.size(0)
    return result


def _index(call: Call, base: str, values: dict[str, Any]) -> tuple[Any, Any]:
    """Return where the index of rows stands among the arguments, and the index; None where it is not of rows."""
    if base.startswith("embedding"):
        return "indices", values["indices"]
    if base.startswith("index_") and "dim" in values:
        whole = values["dim"] % max(1, values["self"].dim()) == 0
        return "index", values["index"] if whole and values["self"].dim() else None
    index = values["indices"][0] if len(values["indices"]) == 1 else None
    if index is not None and index.dtype in (torch.bool, torch.uint8):
        index = None
    return "indices", index


def _checked(call: Call, base: str, index: torch.Tensor, length: int) -> torch.Tensor:
    if index.numel() == 0:
        return index
    lowest, highest = int(index.min()), int(index.max())
    if base in ("index", "index_put_", "_index_put_impl_"):
        if lowest < -length or highest >= length:
            wrong = lowest if lowest < -length else highest
            raise IndexError(f"index {wrong} is out of bounds for dimension 0 with size {length}")
        return torch.where(index < 0, index + length, index)
    if lowest < 0 or highest >= length:
        raise IndexError("index out of range in self")
    return index


def _has_rows(table: torch.Tensor) -> bool:
    """Whether each row along the first axis lies together."""
    if table.dim() == 0 or table.numel() == 0 or table.is_neg() or table.is_conj():
        return False
    return is_dense(table.size()[1:], table.stride()[1:]) and table.stride(0) >= table[0].numel()


def _replaced(call: Call, table: torch.Tensor, position: str, index: torch.Tensor, given: Any = None) -> Any:
    """Run the operator on a small table."""
    values = call.named()
    values["self" if "self" in values else "weight"] = table
    values[position] = [index] if isinstance(values[position], (list, tuple)) else index
    if given is not None:
        values |= given
    schema = call.traits.op._schema.arguments
    return call.traits.op(
        *[values[one.name] for one in schema if not one.kwarg_only],
        **{one.name: values[one.name] for one in schema if one.kwarg_only},
    )


def _read(call: Call, table: torch.Tensor, position: str, index: torch.Tensor) -> torch.Tensor:
    row_bytes = table[0].numel() * table.itemsize
    step = max(1, call.block_bytes // max(1, row_bytes))
    places = index.reshape(-1)
    result = call.result((places.numel(), *table.size()[1:]), table.dtype)
    for start, stop in cut(places.numel(), step):
        rows, back = torch.unique(places[start:stop], return_inverse=True)
        part = _replaced(call, gather(call, table, rows), position, back.to(index.dtype))
        call.place(result[start:stop], part)
    return result.view(*index.size(), *table.size()[1:])


def _write(call: Call, base: str, table: torch.Tensor, position: str, index: torch.Tensor) -> torch.Tensor:
    """Fetch the rows, let the operator write to them, put them back: a block of rows at a time."""
    values = call.named()
    sources = {name: values[name] for name in ("source", "values") if isinstance(values.get(name), torch.Tensor)}
    places = index.reshape(-1)
    per_row = table[0].numel()
    if sources:
        (name, source), = sources.items()
        shape = (*index.size(), *table.size()[1:])
        source = loaded(source).expand(shape).reshape(places.numel(), *table.size()[1:])
    rows, back = torch.unique(places, return_inverse=True)
    step = max(1, call.block_bytes // max(1, per_row * table.itemsize))
    for start, stop in cut(rows.numel(), step):
        chosen = torch.nonzero((back >= start) & (back < stop)).reshape(-1)
        small = gather(call, table, rows[start:stop])
        given = {name: source[chosen]} if sources else None
        _replaced(call, small, position, (back[chosen] - start).to(index.dtype), given)
        scatter(call, table, rows[start:stop], small)
    return table


def _embedding_backward(call: Call) -> Any:
    """Make the table's gradient in pages: rows that were not looked up stay zero pages, which lie nowhere."""
    values = call.named()
    gradient, indices = values["grad_output"], loaded(values["indices"]).reshape(-1)
    width = gradient.size(-1)
    result = call.cls._reserve(call.runtime, (values["num_weights"], width), None, gradient.dtype)
    gradient = gradient.reshape(-1, width)
    rows, back = torch.unique(indices, return_inverse=True)
    step = max(1, call.block_bytes // max(1, width * gradient.itemsize))
    for start, stop in cut(rows.numel(), step):
        chosen = (back >= start) & (back < stop) & (indices != values["padding_idx"])
        chosen = torch.nonzero(chosen).reshape(-1)
        if chosen.numel() == 0:
            continue
        part = _gathered(call, gradient, chosen)
        small = call.traits.op(part, back[chosen] - start, stop - start, -1, values["scale_grad_by_freq"])
        scatter(call, result, rows[start:stop], small)
    return result


def _gathered(call: Call, table: Any, rows: torch.Tensor) -> torch.Tensor:
    return gather(call, table, rows) if type(table) is call.cls and _has_rows(table) else loaded(table[rows])


