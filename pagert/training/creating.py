# SPDX-License-Identifier: Apache-2.0
"""Modules that are made paged: each parameter and buffer goes to pages as its module registers it.

A parameter that is initialised before that is copied, one that is initialised afterwards is
initialised in its pages, by the same kernels and with the same random numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pagert.errors import OutOfFrames
from pagert.geometry import byte_range
from pagert.tensor.copying import copy, load
from pagert.tensor.paged_tensor import PagedTensor
from pagert.training import modules
from pagert.training.lazy import page_when_concrete

if TYPE_CHECKING:
    from pagert.runtime import Runtime

__all__ = ["creating"]

_log = logging.getLogger("pagert")

# Of this thread: others make their modules as they always do.
_innermost: contextvars.ContextVar[_Creation | None] = contextvars.ContextVar(
    "pagert_creation", default=None
)


@contextlib.contextmanager
def creating(
    runtime: Runtime, min_bytes: int, found_plain: Callable[[int], None]
) -> Iterator[None]:
    """Page what modules register in this thread while the context is open; see `Pager.creating`.

    At the end `found_plain` is told the bytes of all tensors that stay plain.
    """
    creation = _Creation(runtime, min_bytes)
    before = _innermost.set(creation)
    handles = [
        register_module_parameter_registration_hook(creation.registered),
        register_module_buffer_registration_hook(creation.registered),
    ]
    try:
        with _PlainWhereTooLarge():
            yield
    finally:
        for handle in handles:
            handle.remove()
        _innermost.reset(before)
    found_plain(creation.finish())


class _Creation:
    """The modules that one context has seen, and the tensors of theirs that have to wait."""

    def __init__(self, runtime: Runtime, min_bytes: int) -> None:
        self._runtime = runtime
        self._min_bytes = min_bytes
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._waiting: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def registered(self, module: torch.nn.Module, name: str, tensor: Any) -> None:
        """Page a tensor that `module` is about to register. The object stays the same."""
        if _innermost.get() is not self or not isinstance(tensor, torch.Tensor):
            return
        if not self._modules or self._modules[-1]() is not module:
            self._modules.append(weakref.ref(module))
        waiting, self._waiting = self._waiting, []
        for label, reference in waiting:
            earlier = reference()
            if earlier is not None and earlier is not tensor:
                self._page_unless_shared(label, earlier)
        self._page_unless_shared(f"{type(module).__name__}.{name}", tensor)

    def finish(self) -> int:
        """Page what had to wait, with its ties, and count the bytes that stay plain."""
        # Not only what waits: a tensor may have been put into a module without being registered.
        made = [module for reference in self._modules if (module := reference()) is not None]
        named = [
            (f"{type(module).__name__}.{name}", tensor)
            for module in made
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        plain_bytes = modules.page_tensors(self._runtime, named, self._min_bytes)
        page = functools.partial(modules.page_module, self._runtime, min_bytes=self._min_bytes)
        for module in made:
            page_when_concrete(self._runtime, module, page)
        _log.info("creating: %s", modules.report(plain_bytes, self._min_bytes))
        return plain_bytes

    def _page_unless_shared(self, label: str, tensor: torch.Tensor) -> None:
        if torch.nn.parameter.is_lazy(tensor) or _waits(self._runtime, label, tensor):
            self._waiting.append((label, weakref.ref(tensor)))
        elif tensor.is_meta or byte_range(tensor)[1] < self._min_bytes:
            return
        else:
            modules.page_tensors(self._runtime, [(label, tensor)], self._min_bytes)


def _waits(runtime: Runtime, label: str, tensor: torch.Tensor) -> bool:
    """Tell whether somebody else looks at the bytes: to move them now would part the two."""
    if tensor.is_meta:
        return False
    modules.check_pageable(runtime, label, tensor)
    return type(tensor) is not PagedTensor and modules.used_elsewhere(tensor)


class _PlainWhereTooLarge(TorchDispatchMode):
    """Initialise in plain memory what does not fit the device tier, one tensor at a time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except OutOfFrames:
            # Nothing was computed: an operator starts when it has its pages. Those on lists run in
            # groups.
            if any(
                isinstance(argument, (list, tuple)) and _holds_pages(argument) for argument in args
            ):
                raise
        lent: dict[int, torch.Tensor] = {}

        def plain(tensor: PagedTensor) -> torch.Tensor:
            if id(tensor) not in lent:
                lent[id(tensor)] = load(PagedTensor, tensor)
            return lent[id(tensor)]

        plain_args, plain_kwargs = _pytree.tree_map_only(PagedTensor, plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        for argument, value in _arguments(func, args, kwargs):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and type(value) is PagedTensor:
                copy(PagedTensor, value, lent[id(value)], overwrite=True)
                if result is lent[id(value)]:
                    result = value
        return result


def _holds_pages(argument: Any) -> bool:
    return any(type(leaf) is PagedTensor for leaf in _pytree.tree_leaves(argument))


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for position, argument in enumerate(cast(Any, func)._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
