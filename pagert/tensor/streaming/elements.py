# SPDX-License-Identifier: Apache-2.0
"""Operators that pick single elements of a large tensor: only the pages of these are pinned.

Each element is a row of its own in the tensor as it lies in memory; see lookups.py.
"""

from __future__ import annotations

from typing import Any

import torch

from pagert.geometry import byte_range, is_dense

from ..ranges import flat
from .call import Call
from .table import gather, loaded, scatter, spread

__all__ = ["NAMES", "run", "take", "try_run"]

_READERS = frozenset({"gather", "take"})
_WRITERS = frozenset({"scatter_", "scatter_add_"})
_COPIERS = frozenset({"scatter", "scatter_add"})
NAMES = _READERS | _WRITERS | _COPIERS


def run(call: Call) -> Any:
    """Run the call on the elements that it needs. Blocks until they were fetched."""
    found = try_run(call)
    if found is NotImplemented:
        raise call.refuse("it picks single elements where the operand lies without holes, and its index is not empty")
    return found


def try_run(call: Call) -> Any:
    """As `run`, or return NotImplemented where that gains nothing or is not possible."""
    base = call.traits.name.split(".")[1]
    values = call.named()
    table = values["self"]
    if type(table) is not call.cls or table.dim() == 0 or table.numel() == 0 or table.is_neg() or table.is_conj():
        return NotImplemented
    if not is_dense(table.size(), table.stride()) or (base == "take" and not table.is_contiguous()):
        return NotImplemented
    if base in _COPIERS:
        writer = getattr(getattr(torch.ops.aten, f"{base}_"), call.traits.op._overloadname)
        return writer(table.clone(), *call.arguments[1:], **call.options)
    index = loaded(values["index"])
    if index.numel() == 0:
        return NotImplemented
    places = _wrapped(index, table.numel()) if base == "take" else _places(table, values["dim"], index)
    if base in _WRITERS:
        return _write(call, base, values, places)
    size_bytes = byte_range(table)[1]
    if size_bytes <= call.runtime.storage.nbytes() and spread(call, flat(table), places) > size_bytes // 2:
        return NotImplemented
    return take(call, table, places)


def take(call: Call, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the elements at `places` of a dense paged tensor, counted in the order in which they lie."""
    rows, back = torch.unique(places, return_inverse=True)
    return gather(call, flat(table), rows)[back]


def _wrapped(index: torch.Tensor, length: int) -> torch.Tensor:
    if int(index.min()) < -length or int(index.max()) >= length:
        raise IndexError("out of range: tried to access an index beyond the tensor's elements")
    return torch.where(index < 0, index + length, index)


def _places(table: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Return where the elements lie that `gather` and `scatter_` mean."""
    dim %= table.dim()
    length = table.size(dim)
    if int(index.min()) < 0 or int(index.max()) >= length:
        wrong = int(index.min()) if int(index.min()) < 0 else int(index.max())
        raise RuntimeError(f"index {wrong} is out of bounds for dimension {dim} with size {length}")
    places = index * table.stride(dim)
    for axis in range(table.dim()):
        if axis != dim:
            shape = [-1 if one == axis else 1 for one in range(table.dim())]
            places = places + (torch.arange(index.size(axis)) * table.stride(axis)).view(shape)
    return places


def _write(call: Call, base: str, values: dict[str, Any], places: torch.Tensor) -> Any:
    table, source = values["self"], values.get("src", values.get("value"))
    if "reduce" in values:
        return NotImplemented
    if isinstance(source, torch.Tensor):
        source = loaded(source)[tuple(slice(length) for length in places.size())].reshape(-1)
    rows, back = torch.unique(places.reshape(-1), return_inverse=True)
    small = gather(call, flat(table), rows)
    getattr(small, base)(0, back, source)
    scatter(call, flat(table), rows, small)
    return table
