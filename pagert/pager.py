# SPDX-License-Identifier: Apache-2.0
"""The pager as its users see it: a runtime that makes tensors and pages modules."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch

from . import compiling
from .errors import ConfigurationError
from .runtime import Runtime
from .tensor.paged_tensor import PagedTensor, check_wrappable
from .trace import Trace
from .trace.recording import record
from .training import modules

__all__ = ["Pager"]

_log = logging.getLogger("pagert")
_Module = TypeVar("_Module", bound=torch.nn.Module)


class Pager(Runtime):
    """One virtual tensor address space over device memory, host memory and flash.

    Construct it with the budgets of its tiers (see `Runtime`), make tensors or page modules, and
    close it, best as a context manager. Every tensor it makes is a `PagedTensor`: whole at all
    times, wherever its bytes are.

    Examples
    --------
    >>> import torch, pagert
    >>> with pagert.Pager(device="cpu", device_bytes="1MiB", host_bytes="4MiB") as pager:
    ...     model = pager.page_(torch.nn.Linear(64, 64), min_bytes=0)
    ...     loss = model(torch.ones(2, 64)).sum()
    ...     loss.backward()
    ...     type(model.weight.grad).__name__
    'PagedTensor'
    """

    plain_bytes: int = 0
    """Bytes of parameters and buffers that the last `page_` found too small to page."""

    def tensor(
        self, data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> PagedTensor:
        """Make a paged tensor with a copy of `data`.

        Parameters
        ----------
        data : tensor or array_like
            A tensor on any device, of any strided dtype, or what `torch.as_tensor` takes. A dense
            layout is kept. The result never shares memory with it. It may be larger than the device
            tier.
        dtype : torch.dtype, optional
            Of the result; that of `data` by default.
        requires_grad : bool
            Whether autograd follows the result. Its gradient is paged too.

        Returns
        -------
        PagedTensor
            On the compute device of this pager.

        Raises
        ------
        UnsupportedTensor
            `data` is sparse, quantized, nested, on the meta device or of another tensor subclass.
        """
        self._check_open("pager.tensor")
        source = data if isinstance(data, torch.Tensor) else torch.as_tensor(data)
        check_wrappable(source)
        if type(source) is PagedTensor and source._runtime is not self:
            source = source.detach().to("cpu") if source.device.type != "cpu" else _plain(source)
        result = PagedTensor._page(self, source, dtype)
        return result.requires_grad_() if requires_grad else result

    def empty(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> PagedTensor:
        """Make a paged tensor of zero pages. They take no room until they are written."""
        self._check_open("pager.empty")
        shape = _shape(size)
        result = PagedTensor._reserve(self, shape, None, dtype or torch.get_default_dtype())
        return result.requires_grad_() if requires_grad else result

    def zeros(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> PagedTensor:
        """Make a paged tensor of zeros. Its pages take no room until they are written."""
        return self.empty(*size, dtype=dtype, requires_grad=requires_grad)

    def full(
        self,
        size: Sequence[int],
        fill_value: bool | int | float | complex,
        *,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> PagedTensor:
        """Make a paged tensor that has the same value everywhere."""
        result = self.empty(size, dtype=dtype or torch.full((), fill_value).dtype)
        result.fill_(fill_value)
        return result.requires_grad_() if requires_grad else result

    def page_(self, module: _Module, min_bytes: int | None = None) -> _Module:
        """Page parameters and buffers in place, and gradients as they are produced.

        Every Parameter stays the same object, so an optimizer may be built before or after. Ties
        are kept. One tensor is moved at a time. Gradients that exist move as well; optimizer state
        that exists stays plain and is used as it is.

        Parameters
        ----------
        module : torch.nn.Module
            Changed in place. Tensors on the meta device are left alone.
        min_bytes : int, optional
            Smaller tensors stay plain; a quarter of a page by default. Their sum is logged and in
            `plain_bytes`.

        Returns
        -------
        torch.nn.Module
            The module itself.

        Raises
        ------
        UnsupportedTensor, ForeignTensor
            A tensor cannot be paged, or belongs to another pager; nothing was changed.
        PagertError
            A parameter is part of a graph that is still alive.
        """
        self._check_open("pager.page_")
        if min_bytes is None:
            min_bytes = self.page_bytes // 4
        elif min_bytes < 0:
            raise ConfigurationError(f"min_bytes={min_bytes}: give 0 or a positive number of bytes")
        self.plain_bytes = modules.page_module(self, module, min_bytes)
        _log.info("%s: %s", type(module).__name__, modules.report(self.plain_bytes, min_bytes))
        return module

    def unpage_(self, module: _Module) -> _Module:
        """Give the parameters, buffers and gradients of a module plain memory again, in place.

        Returns the module.
        """
        self._check_open("pager.unpage_")
        modules.unpage_module(self, module)
        return module

    def trace(self, metadata: dict[str, Any] | None = None) -> AbstractContextManager[Trace]:
        """Record what operators need, and which regions come and go, inside a with block.

        The trace is filled when the block ends. Steps of any optimizer are marked. Pages that a `resident()` block
        holds count as used when it begins.

        Parameters
        ----------
        metadata : dict, optional
            Kept with the trace: text, numbers, lists and mappings of them.

        Returns
        -------
        context manager
            It gives the `pagert.Trace`, for `pagert.simulate` or `Trace.save`.

        Raises
        ------
        PagertError
            A trace of this pager is being recorded already.

        Examples
        --------
        >>> import torch, pagert
        >>> with pagert.Pager(device="cpu", device_bytes="1MiB", host_bytes="4MiB") as pager:
        ...     with pager.trace() as trace:
        ...         total = pager.tensor(torch.ones(4)).sum()
        >>> trace.region_count, trace.operator_count
        (1, 2)
        """
        self._check_open("pager.trace")
        facts = {"device_bytes": self.config.device_bytes, **(metadata or {})}
        return record(self.pump, facts)


def _plain(tensor: PagedTensor) -> torch.Tensor:
    from .tensor.copying import load

    return load(PagedTensor, cast(PagedTensor, tensor.detach()))


def _shape(size: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    lengths: Any = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return tuple(int(length) for length in lengths)


compiling.keep_out("pagert")  # all that runs under operators is loaded by now
