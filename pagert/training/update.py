# SPDX-License-Identifier: Apache-2.0
"""A stock optimizer's update of one parameter, by the optimizer's own `step`.

No arithmetic is written again: `step` runs on a look at the optimizer whose only group holds the one parameter, with
the hyperparameters of its own group and the state that all share.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pagert.errors import OutOfFrames, StepError, UnsupportedOperator
from pagert.geometry import byte_range
from pagert.runtime import Runtime
from pagert.tensor.becoming import set_gradient
from pagert.tensor.paged_tensor import PagedTensor
from pagert.tensor.ranges import HELD_IN_DEVICE, PIECES_IN_DEVICE, WHOLE_IN_DEVICE, cut, page_step

__all__ = ["check_optimizer", "update"]

# Of torch.optim, those that need more than one parameter's gradient, or one of another kind.
_REFUSED = {
    "LBFGS": "its direction comes from all gradients at once, and it runs the backward pass several times in a step",
    "SparseAdam": "it takes sparse gradients only, and those are not paged",
}

# Each element of a parameter depends on the same elements of gradient and state alone, so that a range of it may be
# updated by itself. Adafactor and Muon work with rows, columns and products.
_ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip



def check_optimizer(optimizer: torch.optim.Optimizer, independent: bool) -> None:
    """Raise where parameters cannot be updated one by one, or nobody knows whether they can."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"step_in_backward({name}): give an optimizer, as of torch.optim")
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, getattr(torch.optim, kind)):
            raise UnsupportedOperator(f"step_in_backward({name}): {reason}; step after the backward pass")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedOperator(
            f"step_in_backward({name}): differentiable=True keeps a graph through the update, which a backward pass "
            "cannot do within itself; step after the backward pass"
        )
    if not independent and not _is_stock(optimizer):
        raise UnsupportedOperator(
            f"step_in_backward({name}): it is not an optimizer of torch.optim. If its update of a parameter needs "
            "nothing but that parameter's own gradient, state and group, say so with independent=True"
        )


def update(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: PagedTensor) -> None:
    """Update one paged parameter with what is in its `.grad`. Blocks.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its `state` is changed as by its own step. Hooks on its steps are not called.
    group : dict
        The parameter's group.
    parameter : PagedTensor
        Of any size: where the tensors do not fit a quarter of the device, and the optimizer treats each
        element by itself, ranges are updated one after the other.

    Raises
    ------
    StepError
        The optimizer kept something beyond the parameter's state, as a count of its steps.
    """
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    known = set(state)
    version = parameter._version
    with torch.no_grad():
        if _needs_ranges(optimizer, parameter, state):
            _update_ranges(optimizer, group, parameter, state)
            if state:
                optimizer.state[parameter] = state
        else:
            _step(optimizer, group, parameter, optimizer.state)
            state = optimizer.state.get(parameter, {})
    if parameter._version == version:
        # Fused kernels do not say that they have written. A graph that has saved the parameter must hear of it.
        torch.autograd.graph.increment_version(parameter)
    for name in state.keys() - known:
        value = state[name]
        # Made from the plain gradient, which would have been paged.
        if type(value) is torch.Tensor and value.dim() and value.layout is torch.strided:
            state[name] = PagedTensor._page(parameter._runtime, value)


def _is_stock(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(type(optimizer).step, "__module__", "").startswith("torch.optim.")


def _step(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    state: defaultdict[torch.Tensor, Any],
) -> None:
    attributes = dict(optimizer.__dict__)
    attributes.pop("step", None)  # as LR schedulers wrap it, to count calls of the user's
    lone = {**group, "params": [parameter]}
    attributes |= {
        "param_groups": [lone],
        "state": state,
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    look = object.__new__(type(optimizer))
    look.__dict__.update(attributes)
    step: Callable[..., Any] = type(optimizer).step
    # Beneath what calls the hooks, those for all optimizers too.
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    step(look)
    if _is_stock(optimizer):
        return
    kept = [name for name, value in look.__dict__.items() if attributes.get(name) is not value]
    kept += [f"group[{name!r}]" for name, value in lone.items() if name != "params" and group.get(name) is not value]
    if kept:
        raise StepError(
            f"{type(optimizer).__name__}.step changes {', '.join(kept)}, which parameters share: it cannot run for "
            "each parameter by itself; step after the backward pass"
        )


# Ranges.


def _needs_ranges(
    optimizer: torch.optim.Optimizer, parameter: PagedTensor, state: dict[str, Any]
) -> bool:
    if type(optimizer).__name__ not in _ELEMENTWISE or not _is_stock(optimizer):
        return False
    gradient = parameter.grad
    tensors = [parameter, gradient, *_alike(parameter, state)]
    if not all(isinstance(one, torch.Tensor) and one.is_contiguous() for one in tensors):
        return False
    size_bytes = byte_range(parameter)[1]
    count = 2 if not state else sum(type(one) is PagedTensor for one in tensors)
    return size_bytes * max(count, 3) > _device_bytes(parameter._runtime) // WHOLE_IN_DEVICE


def _update_ranges(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: PagedTensor,
    state: dict[str, Any],
) -> None:
    gradient = parameter.grad
    assert gradient is not None
    cut_names = {name for name, value in state.items() if _is_alike(parameter, value)}
    flat = {name: state[name].view(-1) for name in cut_names}
    first_time = not state
    others = dict(state)
    tensor_count = 2 + max(len(cut_names), 2)
    step = page_step(parameter._runtime, [parameter.itemsize] * tensor_count, PIECES_IN_DEVICE)
    with _held(parameter):
        for start, stop in cut(parameter.numel(), step):
            part = parameter.detach().view(-1)[start:stop]
            set_gradient(part, gradient.detach().view(-1)[start:stop])  # plain, and it stays so
            # Every range begins with the counts that the whole began with.
            mine = {name: _copied(value) for name, value in others.items() if name not in cut_names}
            mine |= {name: value[start:stop] for name, value in flat.items()}
            states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
            if mine:
                states[part] = mine
            _step(optimizer, group, part, states)
            mine = states[part]
            for name, value in mine.items():
                if name in cut_names:
                    continue
                if not (first_time and _is_alike(part, value)):
                    state[name] = value
                    continue
                if start == 0:
                    state[name] = _reserve(parameter, value.dtype)
                state[name].view(-1)[start:stop].copy_(value)


@contextlib.contextmanager
def _held(parameter: PagedTensor) -> Iterator[None]:
    """Hold a parameter in one window, if there is room, so that its ranges leave it whole for its next use."""
    with contextlib.ExitStack() as stack:
        if byte_range(parameter)[1] <= _device_bytes(parameter._runtime) // HELD_IN_DEVICE:
            with contextlib.suppress(OutOfFrames):
                stack.enter_context(parameter.detach().resident())  # type: ignore[attr-defined]
        yield


def _reserve(parameter: PagedTensor, dtype: torch.dtype) -> PagedTensor:
    return PagedTensor._reserve(parameter._runtime, parameter.size(), parameter.stride(), dtype)


def _alike(parameter: torch.Tensor, state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if _is_alike(parameter, value)]


def _is_alike(parameter: torch.Tensor, value: Any) -> bool:
    """Whether a value of the state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _device_bytes(runtime: Runtime) -> int:
    return int(runtime.storage.nbytes())


