# SPDX-License-Identifier: Apache-2.0
"""Parameters and buffers become paged in place, and plain again.

In place means: every Parameter stays the same Python object, so that optimizers, ties, weak
references and hooks that know it keep working. Only what the object is made of is exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.parameter import is_lazy

from pagert.config import format_bytes
from pagert.errors import ForeignTensor, PagertError
from pagert.geometry import byte_range, describe, fills_range
from pagert.tensor import gradients
from pagert.tensor.becoming import become, check_unused, use_count
from pagert.tensor.copying import copy, load
from pagert.tensor.paged_tensor import PagedTensor, check_wrappable
from pagert.tensor.sharing import (
    Named,
    check_exchangeable,
    exchange,
    find_lookers,
    find_outsiders,
    overlapping,
    page_together,
    storage_id,
)

from .derived import without_derived
from .lazy import forget_lazy, page_when_concrete

if TYPE_CHECKING:
    from pagert.runtime import Runtime

__all__ = [
    "become_tied",
    "check_pageable",
    "page_module",
    "page_tensors",
    "report",
    "unpage_module",
    "used_elsewhere",
]


def page_module(runtime: Runtime, module: torch.nn.Module, min_bytes: int) -> int:
    """Page the parameters and buffers of `module`, one at a time.

    Parameters
    ----------
    runtime : Runtime
        The pager that gets the bytes.
    module : torch.nn.Module
        Changed in place. Tensors on the meta device are left as they are; lazy parts are paged in
        their first forward pass, when they have shapes.
    min_bytes : int
        Tensors that are smaller stay plain; they move to the compute device.

    Returns
    -------
    int
        The bytes of all tensors that stayed plain.

    Raises
    ------
    UnsupportedTensor, ForeignTensor
        Before anything is changed: a tensor cannot be paged, or belongs to another pager.
    PagertError
        A parameter is part of a graph that is still alive, or shares its bytes with something that is
        no tensor of Python's. Nothing was changed.
    """
    with without_derived(module):
        plain_bytes = page_tensors(runtime, list(_tensors(module)), min_bytes)
        page_when_concrete(
            runtime, module, functools.partial(page_module, runtime, min_bytes=min_bytes)
        )
    return plain_bytes


def page_tensors(runtime: Runtime, names: Sequence[Named], min_bytes: int) -> int:
    """Page tensors of modules by name, as `page_module` does."""
    named = {
        id(tensor): (name, tensor)
        for name, tensor in reversed(names)
        if not is_lazy(tensor) and not tensor.is_meta
    }
    for name, tensor in reversed(named.values()):
        check_pageable(runtime, name, tensor)
    owners = {
        id(tensor.grad): tensor for _, tensor in named.values() if _has_plain_gradient(tensor)
    }
    groups, plain = _choose(list(reversed(named.values())), owners, min_bytes)
    # A storage that a parameter's gradient lies on is held by the parameter as well.
    held = [cast(torch.Tensor, owner.grad) for owner in owners.values()]
    for group in groups:
        check_exchangeable(group, held)
    # Gradients that share bytes go first: their parameters then find them paged.
    for group in sorted(groups, key=lambda group: id(group[0][1]) not in owners):
        name, tensor = group[0]
        if len(group) > 1 or not fills_range(tensor):
            page_together(PagedTensor, runtime, group, owners)
        else:
            become(PagedTensor, name, tensor, PagedTensor._page(runtime, tensor))
    plain_bytes = 0
    for group in plain:
        plain_bytes += _span_bytes(group)
        for _, tensor in group:
            _move(tensor, runtime.device)
    for _, tensor in named.values():
        if type(tensor) is PagedTensor:
            gradients.keep_paged(tensor)
    return plain_bytes


def unpage_module(runtime: Runtime, module: torch.nn.Module) -> None:
    """Give what `runtime` pages of `module` memory of its own again, one region at a time.

    Tensors outside of the module that look at the same bytes go with them.
    """
    forget_lazy(runtime, module)
    named = {
        id(tensor): (name, tensor)
        for name, tensor in reversed(list(_tensors(module)))
        if not is_lazy(tensor)
    }
    owners: dict[int, torch.Tensor] = {}
    entries: list[Named] = []
    for name, tensor in reversed(named.values()):
        gradient = tensor.grad if tensor.is_leaf else None
        if type(gradient) is PagedTensor and gradient._runtime is runtime and not gradient.requires_grad:
            owners[id(gradient)] = tensor
            entries.append((f"{name}.grad", gradient))
        if type(tensor) is PagedTensor and tensor._runtime is runtime:
            entries.append((name, tensor))
    entries += [
        (f"a paged tensor {describe(tensor)} that shares bytes with the module,", tensor)
        for tensor in find_lookers([tensor for _, tensor in entries])
        if type(tensor) is PagedTensor
    ]
    regions: dict[int, list[Named]] = {}
    for entry in entries:
        regions.setdefault(id(cast(PagedTensor, entry[1])._region), []).append(entry)
    empty = regions.pop(id(None), [])
    held = [cast(torch.Tensor, owner.grad) for owner in owners.values()]
    for group in regions.values():
        check_exchangeable(group, held)
    for group in sorted([empty, *regions.values()], key=lambda group: not _of_gradients(group, owners)):
        _unpage(group, owners)


def _of_gradients(group: list[Named], owners: dict[int, torch.Tensor]) -> bool:
    return any(id(tensor) in owners for _, tensor in group)


def _unpage(group: list[Named], owners: dict[int, torch.Tensor]) -> None:
    if not group:
        return
    first = cast(PagedTensor, group[0][1])
    source = torch.empty(0) if first._region is None else _load_region(first)

    def view_of(tensor: torch.Tensor) -> torch.Tensor:
        if cast(PagedTensor, tensor)._region is None:
            return load(PagedTensor, cast(PagedTensor, tensor.detach()))
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage = source.untyped_storage()
        plain.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        return plain

    exchange(PagedTensor, group, owners, view_of)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _has_plain_gradient(tensor: torch.Tensor) -> bool:
    gradient = tensor.grad if tensor.is_leaf else None
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided


def _choose(
    named: list[Named], owners: dict[int, torch.Tensor], min_bytes: int
) -> tuple[list[list[Named]], list[list[Named]]]:
    """Group the tensors of a module that are plain into those to page and those that stay as they are.

    To page are the parameters and buffers of `min_bytes` and more, and the gradients of parameters (`owners`, by
    the gradient's id) that share bytes with something else. What shares bytes with those and is no
    tensor of the module is in their groups.
    """
    plain = [entry for entry in named if type(entry[1]) is not PagedTensor]
    alone = overlapping(plain)
    small = [group for group in alone if _span_bytes(group) < min_bytes]
    chosen = {id(tensor) for group in alone for _, tensor in group}
    chosen -= {id(tensor) for group in small for _, tensor in group}
    graded = [
        (f"{name}.grad", cast(torch.Tensor, tensor.grad))
        for name, tensor in named
        if id(tensor.grad if tensor.is_leaf else None) in owners
    ]
    followed = {key for key, owner in owners.items() if id(owner) in chosen or type(owner) is PagedTensor}
    storages = {storage_id(t) for _, t in plain + graded if id(t) in chosen | followed}
    known = [entry for entry in plain + graded if storage_id(entry[1]) in storages]
    groups = []
    for group in overlapping(known + find_outsiders(known)):
        ids = {id(tensor) for _, tensor in group}
        if ids & chosen or (len(group) > 1 and ids & followed):
            groups.append(group)
    paged = {id(tensor) for group in groups for _, tensor in group}
    return groups, [group for group in small if id(group[0][1]) not in paged]


def _span_bytes(group: list[Named]) -> int:
    ranges = [byte_range(tensor) for _, tensor in group]
    return max(map(sum, ranges)) - min(start for start, _ in ranges)


def check_pageable(runtime: Runtime, name: str, tensor: torch.Tensor) -> None:
    """Raise `UnsupportedTensor` or `ForeignTensor` where `runtime` cannot have the tensor's bytes."""
    if type(tensor) is PagedTensor:
        if tensor._runtime is not runtime:
            raise ForeignTensor(
                f"{name} {describe(tensor)} belongs to another pager; call its unpage_(module) "
                "first"
            )
        return
    try:
        check_wrappable(tensor)
    except PagertError as error:
        raise type(error)(f"{name}: {error}") from None


def used_elsewhere(tensor: torch.Tensor) -> bool:
    """Tell whether anybody beside the object itself holds on to what a plain tensor is made of."""
    storage = tensor.untyped_storage()
    # Two hold it for sure: the tensor, and the object `storage`.
    return use_count(tensor) > 1 or torch._C._storage_Use_Count(storage._cdata) > 2


def become_tied(name: str, tensor: torch.Tensor, owner: PagedTensor) -> None:
    """Make a plain tensor another look at the bytes of `owner`, which has the same geometry."""
    check_unused(name, tensor)
    become(PagedTensor, name, tensor, PagedTensor._view(owner, tensor, int(owner.storage_offset())))
    gradients.keep_paged(cast(PagedTensor, tensor))


def _load_region(tensor: PagedTensor) -> torch.Tensor:
    size_bytes = torch._C.TensorBase.untyped_storage(tensor).nbytes()
    plain = torch.empty(size_bytes, dtype=torch.uint8, device=tensor.device)
    copy(PagedTensor, plain, PagedTensor._view(tensor, plain, 0), overwrite=False, name="unpage_")
    return plain


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        tensor.data = tensor.data.to(device)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(device)


def report(plain_bytes: int, min_bytes: int) -> str:
    """Say how much was too small to page."""
    return f"{format_bytes(plain_bytes)} in tensors below {format_bytes(min_bytes)} stay unpaged"
