# SPDX-License-Identifier: Apache-2.0
"""Gradients of operands that are larger than the device tier become paged tensors from the start.

The formula of such an operator's derivative often has plain operands only: that of a lookup the gradient and the
indices, that of a matrix product the gradient and the plain input. Its result, as large as the weight, would be plain
memory. So the gradient that reaches such an operator is moved to pages, and the formula comes to the dispatch.

The dispatch runs below autograd, where the operator's node is not known yet: whoever looks at the operator's result
next finds it, by the way of what is deferred (`Region.deferred`). A result that nobody looks at has plain gradients.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from pagert._core.pump import Region

from ..copying import page

if TYPE_CHECKING:
    from .call import Call

__all__ = ["follow"]


# Their derivatives' formulas do not run block by block: a plain gradient, as large as the operand, is the lesser evil.
_UNFOLLOWED = frozenset({"prod", "cumprod", "logcumsumexp"})


class Follower:
    """What stands on a result's region until it is first looked at: then its node pages the gradients it gets."""

    __slots__ = ("_kept", "_result", "_thread")

    waits = False  # it is no work of an optimizer's

    def __init__(self, result: Any, kept: dict[int, Any]) -> None:
        self._result: Any = weakref.ref(result)
        self._kept = kept
        self._thread = threading.get_ident()

    def run(self) -> None:
        """Find the node. Does not block."""
        result = self._result()
        if result is None:
            return
        if self._kept.get(self._thread) is result:
            self._kept.pop(self._thread, None)
        node = result.grad_fn
        if node is not None:
            runtime, cls = result._runtime, type(result)
            node.register_prehook(lambda gradients: _page(cls, runtime, gradients))


def follow(call: Call, results: Any) -> Any:
    """Return results whose gradients will be paged, where a paged operand that is too large needs a gradient."""
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in call.paged):
        return results
    if call.traits.name.split(".")[1] in _UNFOLLOWED:
        return results
    if call.traits.written or not call.traits.op._schema.returns:
        return results
    if isinstance(results, torch.Tensor):
        return _follow_one(call, results)
    if type(results) is tuple:
        return (_follow_one(call, results[0]), *results[1:])
    return results


def _follow_one(call: Call, result: Any) -> Any:
    if not isinstance(result, torch.Tensor) or not (result.is_floating_point() or result.is_complex()):
        return result
    paged = result if type(result) is call.cls else page(call.cls, call.runtime, result)
    region: Any = paged._region
    if isinstance(region, Region) and region.deferred is None:
        kept = _kept(call.runtime)
        # Views take over the region and not the result: it lives until somebody looks, or the next result comes.
        kept[threading.get_ident()] = paged
        region.deferred = Follower(paged, kept)
    return paged


def _kept(runtime: Any) -> dict[int, Any]:
    found: dict[int, Any] = runtime.__dict__.setdefault("unfollowed", {})
    return found


def _page(cls: Any, runtime: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
    first = gradients[0]
    if type(first) is not torch.Tensor or first.layout is not torch.strided or first.requires_grad:
        return None  # none at all, paged already, or part of a graph: create_graph=True
    if runtime.closed:
        return None
    small = first
    for axis in range(first.dim()):
        if first.stride(axis) == 0 and first.size(axis) > 1:  # an expanded one is paged before it is expanded
            small = small.narrow(axis, 0, 1)
    return (cls._page(runtime, small).expand(first.size()), *gradients[1:])
