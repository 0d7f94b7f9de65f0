# SPDX-License-Identifier: Apache-2.0
"""The pager as its users see it: a runtime that makes tensors and pages modules."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch

from . import compiling
from .errors import ConfigurationError
from .files import load_into
from .runtime import Runtime
from .stats import Stats
from .tensor.paged_tensor import PagedTensor, check_wrappable
from .trace import Trace
from .trace.recording import record
from .training import modules
from .training.activations import Activations
from .training.creating import creating
from .training.loading import keep_loaded_paged
from .training.saved import Saved
from .training.stepping import Stepping

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

    _saved: Saved | None = None  # what autograd saved, once it is asked for

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
        that exists stays plain and is used as it is. Tensors outside of the module that share bytes
        with it (views, a flat buffer of parameters or gradients, an older state dict) are paged in
        place with it. Lazy parts are paged in their first forward pass.

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
            A parameter is part of a graph that is still alive, or shares its bytes with something
            that is no tensor of Python's. Nothing was changed.
        """
        self._check_open("pager.page_")
        keep_loaded_paged()
        min_bytes = self._min_bytes(min_bytes)
        self.plain_bytes = modules.page_module(self, module, min_bytes)
        _log.info("%s: %s", type(module).__name__, modules.report(self.plain_bytes, min_bytes))
        return module

    def creating(self, min_bytes: int | None = None) -> AbstractContextManager[None]:
        """Make modules paged from the start: inside the context, what they register goes to pages.

        The model is what its construction followed by `page_` gives, bit for bit, without more
        than one parameter in plain memory. This holds for modules of this thread, with their ties
        and buffers; of nested contexts the innermost counts. A tensor whose bytes are looked at
        from elsewhere, through a view for instance, is paged when that has ended, at the latest at
        the end of the context.

        Parameters
        ----------
        min_bytes : int, optional
            Smaller tensors stay plain; a quarter of a page by default. Their sum is in
            `plain_bytes` after the context.

        Returns
        -------
        context manager

        Raises
        ------
        UnsupportedTensor, ForeignTensor
            From the registration: a tensor cannot be paged, or belongs to another pager. At the
            end of the context: a lazy module has no shape yet.
        PagertError
            At the end of the context: a parameter is part of a graph that is still alive.

        Examples
        --------
        >>> import torch, pagert
        >>> with pagert.Pager(device="cpu", device_bytes="1MiB", host_bytes="4MiB") as pager:
        ...     with pager.creating():
        ...         model = torch.nn.Linear(64, 64)
        ...     type(model.weight).__name__
        'PagedTensor'
        """
        self._check_open("pager.creating")
        keep_loaded_paged()
        return creating(
            self, self._min_bytes(min_bytes), functools.partial(setattr, self, "plain_bytes")
        )

    def load_(
        self,
        module: torch.nn.Module,
        path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        strict: bool = True,
    ) -> Any:
        """Load safetensors files into the tensors of a module, a part of a tensor at a time.

        It does what `module.load_state_dict` does with what is in the files, hooks and conversion
        of dtypes included, and holds at most 4 MiB outside of pages. A tensor that is stored under
        one of its names gives it all of them. Blocks until everything is read.

        Parameters
        ----------
        module : torch.nn.Module
            Its tensors, paged or plain, are written.
        path : path or list of paths
            A safetensors file, several, the index (JSON) of several, or a folder with one of these.
        strict : bool
            Whether names that only the files or only the module have are refused.

        Returns
        -------
        NamedTuple
            `missing_keys` and `unexpected_keys`, lists of str, as `load_state_dict` returns them.

        Raises
        ------
        CheckpointError
            A file is no whole safetensors file, or the files do not belong together; before
            anything is changed.
        CheckpointMismatch
            Shapes differ, or names do and `strict` is set; before anything is changed, unless
            modules have rules of loading of their own.
        UnsupportedTensor
            The module is on the meta device.
        OSError
            A file is missing or cannot be read.
        """
        self._check_open("pager.load_")
        return load_into(module, path, strict)

    def unpage_(self, module: _Module) -> _Module:
        """Give the parameters, buffers and gradients of a module plain memory again, in place.

        Paged tensors outside of the module that share bytes with it go with it. Returns the module.
        """
        self._check_open("pager.unpage_")
        modules.unpage_module(self, module)
        return module

    def _min_bytes(self, asked: int | None) -> int:
        if asked is None:
            return self.page_bytes // 4
        if asked < 0:
            raise ConfigurationError(f"min_bytes={asked}: give 0 or a positive number of bytes")
        return asked

    def step_in_backward(
        self, optimizer: torch.optim.Optimizer, *, accumulate: int = 1, independent: bool = False
    ) -> Stepping:
        """Update each paged parameter within the backward pass, as soon as its gradient is complete.

        Gradients then never become pages, and the optimizer's state moves behind the backward pass. The numbers are
        those of stepping after it, bit for bit. The training loop stays as it is: `optimizer.step()` updates what is
        left (parameters that are not paged, and gradients that autograd never completes for sure), counts as a step
        for LR schedulers and runs the optimizer's hooks; `zero_grad()` must come between two steps.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Any of torch.optim but LBFGS and SparseAdam. Its parameters may be paged before or after.
        accumulate : int
            Backward passes in a step. All but the last accumulate gradients, in pages.
        independent : bool
            Says of an optimizer from elsewhere that it updates a parameter with nothing but the parameter's own
            gradient, state and group.

        Returns
        -------
        Stepping
            `remove()` ends it; `with stepping.accumulating():` is for backward passes that only accumulate;
            `abandon()` begins a new step after one that broke off.

        Raises
        ------
        UnsupportedOperator
            The optimizer is LBFGS, SparseAdam, differentiable, or of an unknown kind. Later: something reads a
            gradient that is gone (`clip_grad_norm_`, `GradScaler`).
        StepError
            Later, from `backward()` or `optimizer.step()`: the parts of a step come in an order that cannot give the
            same numbers, or a step broke off in the middle.

        Examples
        --------
        >>> import torch, pagert
        >>> with pagert.Pager(device="cpu", device_bytes="1MiB", host_bytes="4MiB") as pager:
        ...     model = pager.page_(torch.nn.Linear(64, 64), min_bytes=0)
        ...     optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ...     stepping = pager.step_in_backward(optimizer)
        ...     model(torch.ones(2, 64)).sum().backward()  # the weights are updated here
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     stepping.remove()
        """
        self._check_open("pager.step_in_backward")
        return Stepping(self, optimizer, accumulate, independent)

    def activations(self, min_bytes: int | None = None, *, module: torch.nn.Module | None = None) -> Activations:
        """Put what autograd saves for the backward pass into pages, inside a with block around the forward pass.

        Backward's operators then get paged tensors, which go as soon as they were used. Each storage is stored once,
        whatever views of it are saved. Numbers do not change, and an in-place change of a saved tensor stays an error.
        Changes behind autograd's back, through `x.data`, do not reach what was saved before.

        Parameters
        ----------
        min_bytes : int, optional
            Smaller tensors stay plain; half a page by default: what is stored then takes at most twice its bytes.
        module : torch.nn.Module, optional
            Its plain parameters and buffers are never stored. Parameters that require a gradient, and paged tensors,
            never are.

        Returns
        -------
        Activations
            A context manager that gives itself, with counts of what was stored (`stored_count`, `stored_bytes`,
            `shared_count`, `left_count`, `left_bytes`). It may be entered again; the innermost one counts, also among
            other hooks for saved tensors.

        Raises
        ------
        ConfigurationError
            `min_bytes` is negative.
        TierFull, OutOfFrames
            By the operator that saves: there is no room left for its tensor.

        Examples
        --------
        >>> import torch, pagert
        >>> with pagert.Pager(device="cpu", device_bytes="1MiB", host_bytes="4MiB") as pager:
        ...     x = torch.ones(100, 100, requires_grad=True)
        ...     with pager.activations(min_bytes=4096) as saved:
        ...         loss = x.exp().sin().sum()
        ...     loss.backward()
        ...     saved.stored_bytes, saved.shared_count, pager.stats().activation_bytes
        (40000, 1, 0)
        """
        self._check_open("pager.activations")
        if min_bytes is None:
            min_bytes = self.page_bytes // 2
        elif min_bytes < 0:
            raise ConfigurationError(f"min_bytes={min_bytes}: give 0 or a positive number of bytes")
        if self._saved is None:
            self._saved = Saved(self.storage.nbytes(), getattr(self.config, "policy", "lru"))
        return Activations(self, self._saved, min_bytes, module)

    def stats(self) -> Stats:
        """Return what the tiers hold and what was moved, in bytes. Does not block on I/O.

        Raises
        ------
        PagerClosed
            After `close()`.
        """
        stats, saved = super().stats(), self._saved
        if saved is None:
            return stats
        return dataclasses.replace(
            stats, activation_bytes=saved.held_bytes, activation_stored_bytes=saved.stored_bytes
        )

    def reset_stats(self) -> None:
        """Set the counters to zero, and each tier's peak to what it uses now."""
        super().reset_stats()
        if self._saved is not None:
            self._saved.stored_bytes = 0

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
