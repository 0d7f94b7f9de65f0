# SPDX-License-Identifier: Apache-2.0
"""`type(p)(data, requires_grad=...)`: how libraries make a parameter of the kind of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import sharing
from .persistence import OWN

if TYPE_CHECKING:
    from .region_tensor import RegionTensor

__all__ = ["remake"]


def remake(
    cls: type[RegionTensor], data: Any, requires_grad: bool | None, attributes: dict[str, Any]
) -> torch.Tensor:
    """Return a tensor or parameter on the bytes of `data`; see `PagedTensor`."""
    if not isinstance(data, torch.Tensor):
        raise TypeError(
            f"PagedTensor({type(data).__name__}): it is made of a tensor; use pager.tensor(data) or "
            "pager.empty(size)"
        )
    parameter = requires_grad is not None or bool(attributes.get("_is_param"))
    if requires_grad is None:
        requires_grad = parameter and (data.is_floating_point() or data.is_complex())
    runtime = attributes.get("_runtime")
    if runtime is not None and not isinstance(data, cls) and not data.is_meta:
        # What the graph says of `data` is left behind, as a Parameter's constructor does it.
        data = sharing.page_with_others(cls, runtime, "data", data.detach())
    if parameter:
        result: torch.Tensor = torch.nn.Parameter(data, requires_grad)
    else:
        result = data.detach()
    # Not those that say where the bytes of another tensor lie.
    result.__dict__.update({name: value for name, value in attributes.items() if name not in OWN})
    return result
