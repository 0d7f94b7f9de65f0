# SPDX-License-Identifier: Apache-2.0
"""Tensors that look at the same bytes become paged together, so that they look at the same bytes afterwards.

A storage cannot be exchanged, only what each tensor object is made of. So every tensor on it has to be
found: those of a module are known, others are looked for among all Python objects. Where somebody holds
on to the bytes who is not found, a graph or a buffer of C++ code, paging would silently cut the link, and
is refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert.errors import PagertError
from pagert.geometry import byte_range, describe

from .becoming import become, check_unused, set_gradient, use_count
from .copying import page

if TYPE_CHECKING:
    from pagert.runtime import Runtime

    from .region_tensor import RegionTensor

__all__ = [
    "Named",
    "check_exchangeable",
    "exchange",
    "find_lookers",
    "find_outsiders",
    "is_ordinary",
    "overlapping",
    "page_together",
    "page_with_others",
    "storage_id",
]

Named = tuple[str, torch.Tensor]

_OUTSIDER = "a tensor that shares bytes with"
_TORCH: Any = torch._C
storage_id: Any = _TORCH._storage_id


def overlapping(named: Iterable[Named]) -> list[list[Named]]:
    """Group tensors whose bytes overlap: they are tied and get one region. All others are alone."""
    by_storage: dict[int, list[Named]] = {}
    for entry in named:
        by_storage.setdefault(storage_id(entry[1]), []).append(entry)
    groups: list[list[Named]] = []
    for entries in by_storage.values():
        entries.sort(key=lambda entry: byte_range(entry[1])[0])
        end = -1
        for entry in entries:
            offset_bytes, size_bytes = byte_range(entry[1])
            if offset_bytes < end and size_bytes:
                groups[-1].append(entry)
            else:
                groups.append([entry])
            end = max(end, offset_bytes + size_bytes)
    return groups


def find_outsiders(named: Sequence[Named]) -> list[Named]:
    """Find the tensors that look at the storages of `named` and are not among them.

    Raises
    ------
    PagertError
        Something else than a tensor of this process's Python holds on to one of the storages.
    """
    known: dict[int, list[Named]] = {}
    for name, tensor in named:
        if tensor.numel():
            known.setdefault(storage_id(tensor), []).append((name, tensor))
    missing = {}
    for at, entries in known.items():
        count = _owner_count(entries[0][1]) - len(entries)
        if count > 0:
            missing[at] = count
    if not missing:
        return []
    ids = {id(tensor) for _, tensor in named}
    found = [
        (at, tensor)
        for at, tensor in _tensors_on(missing)
        # A subclass that runs its operators itself has more to it than its bytes.
        if id(tensor) not in ids
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    ]
    outsiders = []
    for at, tensor in found:
        missing[at] -= 1
        outsiders.append((f"{_OUTSIDER} {known[at][0][0]},", tensor))
    for at, count in missing.items():
        if count > 0:
            name, tensor = known[at][0]
            raise PagertError(
                f"{name} {describe(tensor)} shares its bytes with {count} others that are still alive and are "
                "no Python tensors: a graph (page a module before its forward pass, or after backward when "
                "the loss is gone), a storage object, or a buffer of C++ code; let go of them, or give it "
                "bytes of its own, `t.data = t.data.clone()`"
            )
    return outsiders


def check_exchangeable(group: Sequence[Named], held: Sequence[torch.Tensor] = ()) -> None:
    """Raise where a tensor of a group cannot be exchanged together with the others.

    `held` are tensors that a parameter of the caller's holds as its gradient: it will be told.
    """
    views: dict[int, int] = {id(tensor): 1 for tensor in held}
    for _, tensor in group:
        base = tensor._base
        if base is not None:
            views[id(base)] = views.get(id(base), 0) + 1
    for name, tensor in group:
        if tensor.grad_fn is not None:
            raise PagertError(
                f"{name} {describe(tensor)} is the result of a graph that is still alive; detach it, or let go of it"
            )
        count = views.get(id(tensor), 0)
        is_view = count > 0 or tensor._base is not None
        if is_view and not tensor.requires_grad and hasattr(tensor, "_region"):
            continue  # a view of a subclass holds its base several times, and what lay between them
        check_unused(name, tensor, count)


def page_together(
    cls: type[RegionTensor], runtime: Runtime, group: Sequence[Named], owners: dict[int, torch.Tensor]
) -> None:
    """Page tensors that overlap in one storage into one region, each with its own geometry.

    `owners` has the parameter of each gradient in the group, by the gradient's id.
    """
    start = min(byte_range(tensor)[0] for _, tensor in group)
    size_bytes = max(sum(byte_range(tensor)) for _, tensor in group) - start
    for name, tensor in group:
        if start % tensor.itemsize:
            raise PagertError(
                f"{name} {describe(tensor)} starts inside an element of a tensor it shares bytes "
                "with"
            )
    source = torch.empty(0, dtype=torch.uint8, device=group[0][1].device)
    source.set_(group[0][1].untyped_storage(), start, (size_bytes,), (1,))
    whole = page(cls, runtime, source)

    def view_of(tensor: torch.Tensor) -> torch.Tensor:
        return cls._view(whole, tensor, int(tensor.storage_offset()) - start // tensor.itemsize)

    exchange(cls, group, owners, view_of, start)


def exchange(
    cls: type[RegionTensor],
    group: Sequence[Named],
    owners: dict[int, torch.Tensor],
    view_of: Callable[[torch.Tensor], torch.Tensor],
    start: int = 0,
) -> None:
    """Let each tensor of a group become `view_of` it, and views of each other views of each other.

    What lay at byte `start` of the old storage lies at the beginning of the new one.
    """
    ids = {id(tensor) for _, tensor in group}
    bases = {id(tensor): tensor._base for _, tensor in group if id(tensor._base) in ids}
    # A view comes after what it is a view of, so that it is one again and has its version counter.
    for name, tensor in sorted(group, key=lambda entry: id(entry[1]) in bases):
        base = bases.get(id(tensor))
        if base is not None and base.dtype == tensor.dtype:
            offset = int(tensor.storage_offset()) - start // tensor.itemsize
            with torch.set_grad_enabled(not base.requires_grad):
                view = base.as_strided(tensor.size(), tensor.stride(), offset)
        else:
            view = view_of(tensor)
        become(cls, name, tensor, view)
        owner = owners.get(id(tensor))
        if owner is not None:
            set_gradient(owner, tensor)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has bytes of its own that can be paged, and is of no graph."""
    return tensor.layout is torch.strided and not tensor.requires_grad and not tensor.is_meta


def find_lookers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Find the tensors of Python that look at the storages of `tensors` and are not among them."""
    storages = {storage_id(tensor) for tensor in tensors if _owner_count(tensor) > 1}
    if not storages:
        return []
    ids = {id(tensor) for tensor in tensors}
    return [tensor for _, tensor in _tensors_on(storages) if id(tensor) not in ids]


def page_with_others(
    cls: type[RegionTensor], runtime: Runtime, name: str, tensor: torch.Tensor
) -> RegionTensor:
    """Page a plain tensor and whatever else looks at its bytes, all in place.

    What a graph made or holds cannot be exchanged. A copy is paged where that is all that looks at
    the bytes; where others look at them too, it is refused.
    """
    named = [(name, tensor)]
    outsiders = find_outsiders(named)
    of_graph = tensor.grad_fn is not None or use_count(tensor) > 1
    exchangeable = not of_graph and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not exchangeable and not outsiders:
        return page(cls, runtime, tensor)
    if outsiders and all(other.grad_fn is not None for _, other in outsiders):
        return page(cls, runtime, tensor)
    group = next(g for g in overlapping(named + outsiders) if any(t is tensor for _, t in g))
    check_exchangeable(group)
    page_together(cls, runtime, group, {})
    result: Any = tensor
    return result


def _owner_count(tensor: torch.Tensor) -> int:
    """Count the tensors, and whatever else, that hold on to the storage of `tensor`."""
    storage = torch._C.TensorBase.untyped_storage(tensor)
    return torch._C._storage_Use_Count(storage._cdata) - 1  # `storage` itself


def _tensors_on(storage_ids: Iterable[int]) -> list[tuple[int, torch.Tensor]]:
    wanted = frozenset(storage_ids)
    found = []
    for candidate in gc.get_objects():
        # Not isinstance: it would ask objects of any kind for their class.
        if issubclass(type(candidate), torch.Tensor) and torch._C._has_storage(candidate):
            at = storage_id(candidate)
            if at in wanted:
                found.append((at, candidate))
    return found
