# SPDX-License-Identifier: Apache-2.0
"""Lazy modules become paged when their parameters get a shape, in their first forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagert.runtime import Runtime

__all__ = ["forget_lazy", "page_when_concrete"]


class _PageWhenConcrete:
    """A forward pre-hook that pages its module once every tensor of the module has a shape.

    A lazy module makes its parameters in a pre-hook of its own, which is there since the module is, and
    therefore runs before. The Parameter objects stay the same.
    """

    def __init__(self, runtime: Runtime, page: Callable[[torch.nn.Module], Any]) -> None:
        self.runtime = runtime
        self.page = page

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        if not _is_lazy(module):
            _remove(module, self.runtime)
            if not self.runtime.closed:
                self.page(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _PageWhenConcrete:
        return self  # a copy of the module is of the same pager

    def __reduce__(self) -> Any:
        return _nothing, ()  # a module from a file is plain


class _Nothing:
    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        pass


def _nothing() -> _Nothing:
    return _Nothing()


def page_when_concrete(
    runtime: Runtime, module: torch.nn.Module, page: Callable[[torch.nn.Module], Any]
) -> None:
    """Let `page` be called with each part of `module` that is lazy as soon as it is no more."""
    for part in module.modules():
        if _is_lazy(part):
            _remove(part, runtime)
            part.register_forward_pre_hook(_PageWhenConcrete(runtime, page))


def forget_lazy(runtime: Runtime, module: torch.nn.Module) -> None:
    """Leave the lazy parts of `module` plain when they get their shapes."""
    for part in module.modules():
        _remove(part, runtime)


def _is_lazy(part: torch.nn.Module) -> bool:
    tensors = [*part._parameters.values(), *part._buffers.values()]
    return any(tensor is not None and is_lazy(tensor) for tensor in tensors)


def _remove(part: torch.nn.Module, runtime: Runtime) -> None:
    for key, hook in list(part._forward_pre_hooks.items()):
        if isinstance(hook, _PageWhenConcrete) and hook.runtime is runtime:
            del part._forward_pre_hooks[key]
