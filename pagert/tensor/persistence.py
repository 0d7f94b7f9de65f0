# SPDX-License-Identifier: Apache-2.0
"""Copies of paged tensors, and their way into files and to other processes as plain tensors."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any, cast

import torch

from pagert.errors import PagertError
from pagert.geometry import describe

from . import copying
from .unread import is_saving, reduce_unread

if TYPE_CHECKING:
    from .region_tensor import RegionTensor

__all__ = ["OWN", "deepcopy", "plain_object", "reduce", "shallow_copy", "user_attributes"]

# Attributes of a paged tensor that are the paging's own.
OWN = frozenset({"_region", "_runtime", "_footprint", "_is_param"})


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that are not the paging's own."""
    return {name: value for name, value in tensor.__dict__.items() if name not in OWN}


def deepcopy(cls: type[RegionTensor], tensor: RegionTensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a leaf with its whole region, once for all tensors that share it, a range at a time."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "deepcopy of a paged tensor that is the result of a differentiable operation: only "
            "leaves can "
            "be copied with their place in the graph; use .detach() first"
        )
    with torch.no_grad():
        if tensor._region is None:
            result = cls._reserve(tensor._runtime, tensor.size(), tensor.stride(), tensor.dtype)
        else:
            whole = memo.get(id(tensor._region))
            if whole is None:
                whole = _copy_region(cls, tensor)
                memo[id(tensor._region)] = whole
            result = cls._view(whole, tensor, int(tensor.storage_offset()))
    if getattr(tensor, "_is_param", False):
        result._is_param = True
    memo[id(tensor)] = result
    result.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None and not getattr(tensor, "_is_param", False):
        result.grad = copy.deepcopy(
            tensor.grad, memo
        )  # as for a plain tensor; a plain Parameter drops it
    for name, value in user_attributes(tensor).items():
        setattr(result, name, copy.deepcopy(value, memo))
    return result


def _copy_region(cls: type[RegionTensor], tensor: RegionTensor) -> RegionTensor:
    size_bytes = torch._C.TensorBase.untyped_storage(tensor).nbytes()
    like = torch.empty((size_bytes,), dtype=torch.uint8, device="meta")
    source = cls._view(tensor, like, 0)
    target = cls._reserve(tensor._runtime, (size_bytes,), (1,), torch.uint8)
    if not copying.is_never_written(source):
        copying.copy(cls, target, source, overwrite=True, name="deepcopy")
    return target


def shallow_copy(tensor: RegionTensor) -> torch.Tensor:
    """Return another tensor object on the same bytes, as copy.copy of a plain tensor does."""
    with torch.no_grad():
        result = tensor.detach()
    if getattr(tensor, "_is_param", False):
        result._is_param = True
    result.__dict__.update(user_attributes(tensor))
    result.requires_grad_(tensor.requires_grad)
    return result


def reduce(cls: type[RegionTensor], tensor: RegionTensor, protocol: Any) -> Any:
    """Return how to make the plain tensor that stands for `tensor` outside of this process."""
    if is_saving():
        is_parameter = getattr(tensor, "_is_param", False)
        unread = reduce_unread(tensor, is_parameter, user_attributes(tensor))
        if unread is not None:
            return unread
    try:
        return plain_object(cls, tensor).__reduce_ex__(protocol)
    except PagertError as error:
        if threading.current_thread().name != "QueueFeederThread":
            raise
        # What is raised in the thread that feeds a queue is printed and forgotten, and the receiver
        # waits forever. So the refusal itself is sent: it is raised where the tensor was expected.
        return _refuse, (
            type(error),
            f"a paged tensor of {describe(tensor)} was sent through a queue: {error}",
        )


def _refuse(kind: type[PagertError], message: str) -> None:
    raise kind(message)


def plain_object(cls: type[RegionTensor], tensor: RegionTensor) -> torch.Tensor:
    """Return the plain tensor or Parameter that stands for `tensor` outside of this process."""
    plain = copying.load(cls, cast("RegionTensor", tensor.detach()))
    if getattr(tensor, "_is_param", False):
        plain = torch.nn.Parameter(plain, requires_grad=tensor.requires_grad)
    else:
        plain.requires_grad_(tensor.requires_grad)
    plain.__dict__.update(user_attributes(tensor))
    return plain
