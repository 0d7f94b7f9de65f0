# SPDX-License-Identifier: Apache-2.0
"""Safetensors files into a module, by the module's own `load_state_dict`, a part of a tensor at a time.

What `load_state_dict` is given are tensors whose bytes lie in the files. So a module's hooks, its
own rules of loading and the conversion of dtypes are what they always are; only the copy into a
parameter is carried out by parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pagert.errors import CheckpointMismatch, UnsupportedTensor
from pagert.files.checkpoint import Checkpoint
from pagert.files.safetensors import StoredTensor
from pagert.files.ties import identity, tied

__all__ = ["load_into"]

_NAMES_SHOWN = 5


class _FileTensor(torch.Tensor):
    """A tensor whose bytes lie in a checkpoint. An operator other than a copy reads it whole."""

    _checkpoint: Checkpoint
    _stored: StoredTensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, checkpoint: Checkpoint, stored: StoredTensor) -> _FileTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype)
        tensor._checkpoint, tensor._stored = checkpoint, stored
        return tensor

    def read(self) -> torch.Tensor:
        return self._checkpoint.read(self._stored)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _pytree.tree_map_only(_FileTensor, _FileTensor.read, (args, kwargs or {}))
        return func(*args, **kwargs)


class _ByParts(TorchDispatchMode):
    """Carry out copies from files by parts; once where names of one tensor are loaded alike."""

    def __init__(self) -> None:
        super().__init__()
        self._done: set[tuple[int, object]] = set()
        self.failure: BaseException | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(issubclass(kind, _FileTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        try:
            if func is torch.ops.aten.copy_.default and _is_plain_copy(args[0], args[1]):
                target, source = args[0], args[1]
                key = (id(source), identity(target))
                if key not in self._done:
                    source._checkpoint.read_into(source._stored, target)
                    self._done.add(key)
                return target
            return _FileTensor.__torch_dispatch__(func, types, args, kwargs)
        except Exception as error:  # `load_state_dict` would keep no more than its text
            self.failure = self.failure or error
            raise


def _is_plain_copy(target: torch.Tensor, source: Any) -> bool:
    return (
        type(source) is _FileTensor
        and type(target) is not _FileTensor
        and target.shape == source.shape
    )


def load_into(
    module: torch.nn.Module,
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    strict: bool = True,
) -> Any:
    """Load safetensors files into the tensors of a module, paged or plain; see `Pager.load_`."""
    with Checkpoint(path) as checkpoint:
        targets = {
            name: tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }
        state = {
            name: _FileTensor.of(checkpoint, stored) for name, stored in checkpoint.tensors.items()
        }
        _add_ties(state, targets, checkpoint.metadata)
        _check(module, targets, state, strict)
        with _ByParts() as copies:
            try:
                return module.load_state_dict(state, strict=strict)
            except RuntimeError as error:
                if copies.failure is not None:
                    raise copies.failure from error
                if not str(error).startswith("Error(s) in loading state_dict"):
                    raise
                raise CheckpointMismatch(str(error)) from error


def _add_ties(
    state: dict[str, _FileTensor],
    targets: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Give a tensor that is stored under one of its names its other names too."""
    for names in tied(targets.items()):
        stored = [name for name in names if name in state]
        for name in names:
            if stored and name not in state:
                state[name] = state[stored[0]]
    for name in targets:
        if name not in state and metadata.get(name) in state:
            state[name] = state[metadata[name]]


def _check(
    module: torch.nn.Module,
    targets: Mapping[str, torch.Tensor],
    state: Mapping[str, _FileTensor],
    strict: bool,
) -> None:
    """Refuse what does not belong together before anything is changed, where that can be known."""
    for name in targets.keys() & state.keys():
        if targets[name].is_meta:
            raise UnsupportedTensor(
                f"{name} is on the meta device, where it has no bytes to load into; make the model "
                "inside `with pager.creating():`"
            )
    unsure = tuple(_with_rules_of_their_own(module))
    missing = [name for name in targets if name not in state and not name.startswith(unsure)]
    unexpected = [name for name in state if name not in targets and not name.startswith(unsure)]
    problems = []
    for name in targets:
        if name in state and not name.startswith(unsure) and not _fits(targets[name], state[name]):
            problems.append(
                f"{name} is {tuple(state[name].shape)} in the checkpoint and "
                f"{tuple(targets[name].shape)} in the model"
            )
    if strict:
        problems += [f"{name} is missing in the checkpoint" for name in missing]
        problems += [f"{name} is not in the model" for name in unexpected]
    if problems:
        shown = "; ".join(problems[:_NAMES_SHOWN])
        rest = len(problems) - _NAMES_SHOWN
        raise CheckpointMismatch(
            f"the checkpoint does not fit {type(module).__name__}, which is unchanged: {shown}"
            + (f"; and {rest} more" if rest > 0 else "")
            + "; load the model's own checkpoint"
            + (", or use strict=False for names that differ" if strict else "")
        )


def _with_rules_of_their_own(module: torch.nn.Module) -> set[str]:
    """Return the prefixes below which only `load_state_dict` itself knows what is loaded where.

    A module's hooks and rules are given the names below its own prefix alone.
    """
    prefixes = set()
    for name, inner in module.named_modules(remove_duplicate=False):
        if (
            inner._load_state_dict_pre_hooks
            or type(inner)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
            or type(inner).set_extra_state is not torch.nn.Module.set_extra_state
        ):
            prefixes.add(f"{name}." if name else "")
    return prefixes


def _fits(target: torch.Tensor, stored: torch.Tensor) -> bool:
    # One element with and without an axis: torch loads files of its first versions.
    return target.shape == stored.shape or (target.dim() == 0 and tuple(stored.shape) == (1,))
