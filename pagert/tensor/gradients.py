# SPDX-License-Identifier: Apache-2.0
"""A paged leaf has a paged gradient: it moves to pages as soon as autograd has produced it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from .copying import page

if TYPE_CHECKING:
    from .region_tensor import RegionTensor

__all__ = ["keep_paged", "page_gradient"]


def keep_paged(tensor: RegionTensor) -> None:
    """See to it that gradients of a leaf are paged.

    Once is enough; a tensor without gradient is left alone.
    """
    if not (tensor.is_leaf and tensor.requires_grad):
        return
    hooks = tensor._post_accumulate_grad_hooks
    if hooks is None or page_gradient not in hooks.values():
        tensor.register_post_accumulate_grad_hook(page_gradient)


def page_gradient(parameter: torch.Tensor) -> None:
    """Replace a plain gradient by a paged one. Later micro-batches are added to it in place."""
    gradient = parameter.grad
    runtime = getattr(parameter, "_runtime", None)
    if runtime is None or type(gradient) is not torch.Tensor:
        return  # unpaged since, or paged already
    if gradient.layout is not torch.strided or gradient.requires_grad:
        return  # a sparse gradient, or part of a graph: create_graph=True
    cls = cast("type[RegionTensor]", type(parameter))
    parameter.grad = page(cls, runtime, gradient, refuse_readers=False)
