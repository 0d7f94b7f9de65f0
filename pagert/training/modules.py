# SPDX-License-Identifier: Apache-2.0
"""Parameters and buffers become paged in place, and plain again.

In place means: every Parameter stays the same Python object, so that optimizers, ties, weak
references and hooks that know it keep working. Only what the object is made of is exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from pagert.config import format_bytes
from pagert.errors import ForeignTensor, PagertError
from pagert.geometry import byte_range, describe
from pagert.tensor import gradients
from pagert.tensor.copying import copy, load
from pagert.tensor.paged_tensor import PagedTensor, check_wrappable
from pagert.tensor.persistence import user_attributes

if TYPE_CHECKING:
    from pagert.runtime import Runtime

_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad

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
        Changed in place. Tensors on the meta device are left as they are.
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
        A parameter is part of a graph that is still alive; what was paged before it stays paged.
    """
    return page_tensors(runtime, list(_tensors(module)), min_bytes)


def page_tensors(
    runtime: Runtime, names: Sequence[tuple[str, torch.Tensor]], min_bytes: int
) -> int:
    """Page tensors of modules by name, as `page_module` does."""
    named = {
        id(tensor): (name, tensor) for name, tensor in reversed(names) if not tensor.is_meta
    }
    for name, tensor in reversed(named.values()):
        check_pageable(runtime, name, tensor)
        if type(tensor) is not PagedTensor:
            _check_unused(name, tensor)
    plain_bytes = 0
    for group in _shared_bytes(
        [entry for entry in named.values() if type(entry[1]) is not PagedTensor]
    ):
        start = min(byte_range(tensor)[0] for _, tensor in group)
        size_bytes = max(sum(byte_range(tensor)) for _, tensor in group) - start
        if size_bytes < min_bytes:
            plain_bytes += size_bytes
            for _, tensor in group:
                _move(tensor, runtime.device)
        elif len(group) == 1:
            name, tensor = group[0]
            _become(name, tensor, PagedTensor._page(runtime, tensor))
        else:
            _page_tied(runtime, group, start, size_bytes)
    for _, tensor in named.values():
        if type(tensor) is PagedTensor:
            gradients.keep_paged(tensor)
    return plain_bytes


def unpage_module(runtime: Runtime, module: torch.nn.Module) -> None:
    """Give what `runtime` pages of `module` memory of its own again, one tensor at a time."""
    loaded: dict[int, tuple[object, torch.Tensor]] = {}  # by region: ties through one storage stay
    named = {id(tensor): (name, tensor) for name, tensor in reversed(list(_tensors(module)))}
    paged = [
        (name, tensor)
        for name, tensor in reversed(named.values())
        if type(tensor) is PagedTensor and tensor._runtime is runtime
    ]
    for name, tensor in paged:
        _check_unused(name, tensor)
    for name, tensor in paged:
        if tensor._region is None:
            plain = load(PagedTensor, _detached(tensor))
        else:
            # The entry holds the region, so that its id stays its own while the loop runs.
            key = id(tensor._region)
            _, source = loaded.setdefault(key, (tensor._region, _load_region(tensor)))
            plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            plain.set_(
                source.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        _become(name, tensor, plain)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


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


def _check_unused(name: str, tensor: torch.Tensor) -> None:
    """Raise where C++ holds on to what the object is made of:

    exchanging it would leave that behind.
    """
    if _use_count(tensor) > 1 and _gradient_node(tensor) is None:
        raise PagertError(
            f"{name} {describe(tensor)} is used by a graph or a view that is still alive: page a "
            "module before its "
            "forward pass, or after backward when the loss and the views are gone"
        )


def used_elsewhere(tensor: torch.Tensor) -> bool:
    """Tell whether anybody beside the object itself holds on to what a plain tensor is made of."""
    storage = tensor.untyped_storage()
    # Two hold it for sure: the tensor, and the object `storage`.
    return _use_count(tensor) > 1 or torch._C._storage_Use_Count(storage._cdata) > 2


def _use_count(tensor: torch.Tensor) -> int:
    count: Any = tensor
    return count._use_count()


def _detached(tensor: PagedTensor) -> PagedTensor:
    return cast(PagedTensor, tensor.detach())


def _gradient_node(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the node that receives a leaf's gradient, if that is all that holds on to the leaf."""
    if not (tensor.is_leaf and tensor.requires_grad and _use_count(tensor) == 2):
        return None
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return node if _use_count(tensor) == 2 else None


def _refuse_gradient(name: str, gradients: tuple[torch.Tensor, ...]) -> None:
    raise PagertError(
        f"backward reached {name} through a graph from before it was paged or unpaged; run "
        "forward again"
    )


def _shared_bytes(named: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Group tensors whose bytes overlap: they are tied and get one region. All others are alone."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for entry in named:
        by_storage.setdefault(entry[1].untyped_storage()._cdata, []).append(entry)
    groups: list[list[tuple[str, torch.Tensor]]] = []
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


def _page_tied(
    runtime: Runtime, group: list[tuple[str, torch.Tensor]], start: int, size_bytes: int
) -> None:
    """Page tensors that overlap in one storage into one region, each with its own geometry."""
    source = torch.empty(0, dtype=torch.uint8, device=group[0][1].device)
    source.set_(group[0][1].untyped_storage(), start, (size_bytes,), (1,))
    whole = PagedTensor._page(runtime, source)
    for name, tensor in group:
        if start % tensor.itemsize:
            raise PagertError(
                f"{name} {describe(tensor)} starts inside an element of a tensor it shares bytes "
                "with"
            )
        _become(
            name,
            tensor,
            PagedTensor._view(
                whole, tensor, int(tensor.storage_offset()) - start // tensor.itemsize
            ),
        )


def become_tied(name: str, tensor: torch.Tensor, owner: PagedTensor) -> None:
    """Make a plain tensor another look at the bytes of `owner`, which has the same geometry."""
    _check_unused(name, tensor)
    _become(name, tensor, PagedTensor._view(owner, tensor, int(owner.storage_offset())))
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


def _become(name: str, tensor: torch.Tensor, replacement: torch.Tensor) -> None:
    """Give the object `tensor` the class, the implementation and the bytes of `replacement`.

    Everything else that the object has stays: its gradient (which goes the same way), its hooks,
    attributes and weak references.
    """
    node = _gradient_node(tensor)
    if node is not None:
        # A graph that nobody will run backward any more, most likely; if somebody does, it says so.
        node.register_prehook(functools.partial(_refuse_gradient, name))
    gradient = tensor.grad
    hooks = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    attributes = user_attributes(tensor)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    if type(replacement) is PagedTensor and is_parameter:
        replacement._is_param = True
    elif is_parameter:
        replacement = torch.nn.Parameter(replacement, requires_grad=False)
    # Not by the property: the hook for gradients comes with those of the tensor.
    _REQUIRES_GRAD.__set__(replacement, tensor.requires_grad)
    if gradient is not None and gradient.layout is torch.strided:
        _follow_gradient(name, gradient, replacement)
        replacement.grad = gradient
    replacement.__dict__.update(attributes)
    torch._C._swap_tensor_impl(tensor, replacement)
    tensor.__class__, replacement.__class__ = replacement.__class__, tensor.__class__
    tensor.__dict__, replacement.__dict__ = replacement.__dict__, tensor.__dict__
    # Hooks are known to the object and to the implementation: tell the new one.
    if hooks[0] is not None:
        tensor._backward_hooks = hooks[0]
    if hooks[1] is not None:
        tensor._post_accumulate_grad_hooks = hooks[1]


def _follow_gradient(name: str, gradient: torch.Tensor, replacement: torch.Tensor) -> None:
    """Page or unpage an existing gradient with its parameter. The object stays the same."""
    if type(replacement) is PagedTensor and type(gradient) is torch.Tensor:
        _become(f"{name}.grad", gradient, PagedTensor._page(replacement._runtime, gradient))
    elif type(replacement) is not PagedTensor and type(gradient) is PagedTensor:
        _become(f"{name}.grad", gradient, load(PagedTensor, _detached(gradient)))


def report(plain_bytes: int, min_bytes: int) -> str:
    """Say how much was too small to page."""
    return f"{format_bytes(plain_bytes)} in tensors below {format_bytes(min_bytes)} stay unpaged"
