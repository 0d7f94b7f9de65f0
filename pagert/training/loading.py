# SPDX-License-Identifier: Apache-2.0
"""What is loaded in the place of paged tensors goes to pages, one tensor at a time.

`load_state_dict` of a module copies into its tensors, paged ones as well; with `assign=True` it
takes those that it is given. `load_state_dict` of an optimizer takes them always. Neither asks the
parameter, so both are told here, once for the process: other tensors are left alone.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from pagert.tensor.copying import load
from pagert.tensor.paged_tensor import PagedTensor
from pagert.training import modules

__all__ = ["keep_loaded_paged"]

# Frames between a registration hook and `_load_from_state_dict`: __setattr__ and register_*.
_FRAMES = 5


@functools.cache
def keep_loaded_paged() -> None:
    """See to it from now on that what is loaded in the place of paged tensors is paged."""
    assigned = _Assigned()
    register_module_parameter_registration_hook(assigned.registered)
    register_module_buffer_registration_hook(assigned.registered)
    _page_optimizer_state()


def _page_optimizer_state() -> None:
    # Where `load_state_dict` gives a tensor of the state the dtype and the device of its parameter.
    # No hook of torch sees each tensor, and one for all of them would see them all in plain memory.
    as_parameter = torch.optim.Optimizer._process_value_according_to_param_policy

    @functools.wraps(as_parameter)
    def place(param: Any, value: Any, *rest: Any, **named: Any) -> Any:
        if type(param) is not PagedTensor:
            if type(value) is PagedTensor:  # it would outlive its pager
                value = load(PagedTensor, value)
            return as_parameter(param, value, *rest, **named)
        key = rest[2] if len(rest) > 2 else named.get("key")
        if key == "step" or not _is_state_of(param, value):
            return as_parameter(param, value, *rest, **named)
        dtype = param.dtype if param.is_floating_point() else value.dtype
        if type(value) is PagedTensor and value._runtime is not param._runtime:
            value = load(PagedTensor, value)
        return PagedTensor._page(param._runtime, value, dtype)

    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(place)  # type: ignore[method-assign, assignment]


def _is_state_of(parameter: PagedTensor, value: torch.Tensor) -> bool:
    """Tell whether it is made after the parameter, and large enough for a page.

    What is larger than the parameter is of an optimizer that joins all parameters in one vector.
    """
    return (
        type(value) in (torch.Tensor, PagedTensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
        and value.numel() <= parameter.numel()
        and value.numel() * value.itemsize >= parameter._runtime.page_bytes // 4
    )


class _Assigned(threading.local):
    """Tensors that `load_state_dict(assign=True)` puts where a paged one was; each thread has its own loads."""

    def __init__(self) -> None:
        self._load: object = None  # which call's tensors `_paged` speaks of
        self._paged: dict[object, tuple[StorageWeakRef, weakref.ref[PagedTensor]]] = {}

    def registered(self, module: torch.nn.Module, name: str, tensor: Any) -> None:
        """Page a tensor in place where a load is about to put it in the place of a paged one."""
        before: Any = module._parameters.get(name)
        if before is None:
            before = module._buffers.get(name)
        if type(before) is not PagedTensor or type(tensor) not in (
            torch.Tensor,
            torch.nn.Parameter,
        ):
            return
        running = _running_load()
        if running is None or tensor.layout is not torch.strided or tensor.is_meta:
            return
        if running is not self._load:
            self._load, self._paged = running, {}
        label = f"{type(module).__name__}.{name}"
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        known = self._paged.get(key)
        owner = None if known is None or known[0].expired() else known[1]()
        if owner is not None:  # two names of one tensor stay that
            modules.become_tied(label, tensor, owner)
            return
        modules.page_tensors(before._runtime, [(label, tensor)], 0)
        self._paged[key] = (storage, weakref.ref(cast(PagedTensor, tensor)))


def _running_load() -> object | None:
    """Return what is one and the same within a `load_state_dict` of a module that is setting a tensor.

    Other assignments are what their author meant: to a plain tensor, for instance.
    """
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame.f_code is torch.nn.Module._load_from_state_dict.__code__:
            return frame.f_locals["error_msgs"]
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
