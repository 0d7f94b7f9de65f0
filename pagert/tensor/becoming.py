# SPDX-License-Identifier: Apache-2.0
"""A tensor object gets another class and other bytes, and stays the same object."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch

from pagert.errors import PagertError
from pagert.geometry import describe

from .copying import load, page
from .persistence import user_attributes

if TYPE_CHECKING:
    from .region_tensor import RegionTensor

__all__ = ["become", "check_unused", "set_gradient", "use_count"]

_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad
_GRAD: Any = torch._C.TensorBase.grad


def become(
    cls: type[RegionTensor], name: str, tensor: torch.Tensor, replacement: torch.Tensor
) -> None:
    """Give the object `tensor` the class, the implementation and the bytes of `replacement`.

    Everything else that the object has stays: its gradient (which goes the same way), its hooks,
    attributes, the dtype asked for its gradient, and weak references.
    """
    node = _gradient_node(tensor)
    if node is not None:
        # A graph that nobody will run backward any more, most likely; if somebody does, it says so.
        node.register_prehook(functools.partial(_refuse_gradient, name))
    gradient = tensor.grad if tensor.is_leaf else None
    hooks = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    attributes = user_attributes(tensor)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    if type(replacement) is cls and is_parameter:
        replacement._is_param = True
    elif is_parameter:
        replacement = torch.nn.Parameter(replacement, requires_grad=False)
    # Not by the property: the hook for gradients comes with those of the tensor.
    _REQUIRES_GRAD.__set__(replacement, tensor.requires_grad)
    _keep_gradient_dtype(tensor, replacement)
    if gradient is not None and gradient.layout is torch.strided:
        _follow_gradient(cls, name, gradient, replacement)
        set_gradient(replacement, gradient)
    replacement.__dict__.update(attributes)
    torch._C._swap_tensor_impl(tensor, replacement)
    tensor.__class__, replacement.__class__ = replacement.__class__, tensor.__class__
    tensor.__dict__, replacement.__dict__ = replacement.__dict__, tensor.__dict__
    # Hooks are known to the object and to the implementation: tell the new one.
    if hooks[0] is not None:
        tensor._backward_hooks = hooks[0]
    if hooks[1] is not None:
        tensor._post_accumulate_grad_hooks = hooks[1]


def set_gradient(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    """Assign a gradient as it is: the property of a paged tensor would page it."""
    _GRAD.__set__(tensor, gradient)


def _keep_gradient_dtype(tensor: torch.Tensor, replacement: torch.Tensor) -> None:
    """Ask for gradients of the same dtype, where the user has asked for another one than usual."""
    if tensor.is_leaf and tensor.requires_grad:
        dtype = tensor.grad_dtype
        if dtype is not tensor.dtype:
            replacement.grad_dtype = dtype


def check_unused(name: str, tensor: torch.Tensor, explained: int = 0) -> None:
    """Raise where C++ holds on to what the object is made of:

    exchanging it would leave that behind. `explained` such references go with it.
    """
    if use_count(tensor) > 1 + explained and _gradient_node(tensor) is None:
        raise PagertError(
            f"{name} {describe(tensor)} is used by a graph or a view that is still alive: page a "
            "module before its "
            "forward pass, or after backward when the loss and the views are gone"
        )


def use_count(tensor: torch.Tensor) -> int:
    """Count what holds on to the implementation of a tensor: its object, graphs, views of it."""
    count: Any = tensor
    return count._use_count()


def _gradient_node(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the node that receives a leaf's gradient, if that is all that holds on to the leaf."""
    if not (tensor.is_leaf and tensor.requires_grad and use_count(tensor) == 2):
        return None
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return node if use_count(tensor) == 2 else None


def _refuse_gradient(name: str, gradients: tuple[torch.Tensor, ...]) -> None:
    raise PagertError(
        f"backward reached {name} through a graph from before it was paged or unpaged; run "
        "forward again"
    )


def _follow_gradient(
    cls: type[RegionTensor], name: str, gradient: torch.Tensor, replacement: torch.Tensor
) -> None:
    """Page or unpage an existing gradient with its parameter. The object stays the same."""
    if type(replacement) is cls and type(gradient) is torch.Tensor:
        become(cls, f"{name}.grad", gradient, page(cls, replacement._runtime, gradient))
    elif type(replacement) is not cls and type(gradient) is cls:
        become(cls, f"{name}.grad", gradient, load(cls, cast("RegionTensor", gradient.detach())))
