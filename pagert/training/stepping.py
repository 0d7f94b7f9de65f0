# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step within the backward pass: each parameter is updated as soon as its gradient is complete.

Autograd runs a leaf's accumulation once in a backward pass, when all uses in the graph have contributed, so the hook
behind it sees the whole gradient, of tied parameters too. It goes straight into the update and is freed. What has no
such moment (parameters that are not paged, gradients that are part of a graph, sparse ones, those of a pass within a
pass) is left to `optimizer.step()`, which the training loop calls as ever and which ends the step.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from pagert.errors import ConfigurationError, StepError
from pagert.geometry import describe
from pagert.tensor import gradients
from pagert.tensor.paged_tensor import PagedTensor

from .update import check_optimizer, update
from .used_gradient import ONE_GRADIENT, UsedGradient

if TYPE_CHECKING:
    from pagert.runtime import Runtime

__all__ = ["Stepping"]

_Groups = dict[int, dict[str, Any]]  # the group of each parameter, by the parameter's id


class Stepping:
    """Steps of one optimizer in the backward pass, until `remove`. Made by `Pager.step_in_backward`.

    A step is: one backward pass, or `accumulate` of them, then `optimizer.step()`. Weights change during the last
    backward pass. The optimizer holds this object; parameters know it weakly.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        accumulate: int,
        independent: bool,
    ) -> None:
        if type(accumulate) is not int or accumulate < 1:
            raise ConfigurationError(
                f"accumulate={accumulate!r}: give the number of backward passes in a step, at least 1"
            )
        check_optimizer(optimizer, independent)
        self._runtime = runtime
        self._optimizer = weakref.ref(optimizer)
        self._accumulate = accumulate
        self._only_accumulates = 0  # contexts that are open
        self._hooks: dict[int, Any] = {}  # by id of the parameter
        self._removed = False
        self._task: int | None = None  # autograd's number of the backward pass that runs, or broke off
        self._in_step = False  # optimizer.step() runs, or broke off
        self._final = False
        self._updating: torch.Tensor | None = None
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._groups: _Groups = {}
        self._settings: list[dict[str, Any]] = []
        self._known: set[int] = set()  # parameters that had state before this step
        self._begin_step()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if any(isinstance(hook, _Hook) and hook.of() is not None for hook in _hooks_of(parameter)):
                    raise ConfigurationError(
                        f"a parameter {describe(parameter)} steps in the backward pass already; call remove() on what "
                        "step_in_backward returned for it first"
                    )
        self._follow(optimizer)
        self._step_hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state),
            optimizer.register_load_state_dict_pre_hook(self._before_state),
        ]

    # What users call.

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let the backward passes inside only accumulate gradients, in pages. They do not count for `accumulate`."""
        self._only_accumulates += 1
        try:
            yield
        finally:
            self._only_accumulates -= 1

    def abandon(self) -> None:
        """Give up a step that broke off, and begin a new one.

        What was updated stays updated; gradients that are left are dropped. Does nothing to a step that has updated
        nothing but drop its gradients. A parameter whose own update was interrupted may be updated in part.
        """
        optimizer = self._optimizer()
        for group in optimizer.param_groups if optimizer is not None else ():
            for parameter in group["params"]:
                parameter.grad = None
        self._task = None
        self._in_step = False
        self._hidden.clear()
        self._begin_step()

    def remove(self) -> None:
        """Step after the backward pass again, as without. Idempotent.

        Raises
        ------
        StepError
            A step is half done: call `optimizer.step()` or `abandon()` first.
        """
        if self._removed:
            return
        if self._updated or self._in_step:
            raise StepError(
                f"remove() with {len(self._updated)} parameters updated in a step that has not ended: call "
                "optimizer.step() first, or abandon()"
            )
        self._removed = True
        for hook in [*self._step_hooks, *self._hooks.values()]:
            hook.remove()
        optimizer = self._optimizer()
        for group in optimizer.param_groups if optimizer is not None else ():
            for parameter in group["params"]:
                if type(parameter) is PagedTensor:
                    gradients.keep_paged(parameter)

    # Within a backward pass.

    def receive(self, parameter: torch.Tensor) -> None:
        """Take a gradient that autograd has just accumulated: update with it, or keep it."""
        gradient = parameter.grad
        if type(gradient) is UsedGradient:
            parameter.grad = gradient = gradient.take_sum()
        if id(parameter) in self._updated:
            self._broken = True
            self._fail(
                f"a parameter {describe(parameter)} got another gradient in the step in which it was updated: "
                f"{ONE_GRADIENT}"
            )
        optimizer = self._optimizer()
        group: dict[str, Any] | None = None
        if optimizer is not None and _is_nested():
            self._nested.add(id(parameter))
        elif optimizer is not None:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._begin_pass(task, optimizer)
            group = self._groups.get(id(parameter)) if self._final else None
        if group is None or not self._is_due(parameter):
            gradients.page_gradient(parameter)
            return
        paged = cast(PagedTensor, parameter)
        self._updating = parameter
        # Before anything changes: an update that breaks off leaves the parameter changed, or nobody knows.
        self._updated[id(parameter)] = parameter
        assert optimizer is not None and gradient is not None
        update(optimizer, group, paged)
        parameter.grad = UsedGradient(gradient)
        self._updating = None

    def _is_due(self, parameter: torch.Tensor) -> bool:
        gradient = parameter.grad
        return (
            type(parameter) is PagedTensor
            and parameter._runtime is self._runtime
            and id(parameter) not in self._nested
            and gradient is not None
            and gradient.layout is torch.strided
            and not gradient.requires_grad
        )

    def _begin_pass(self, task: int, optimizer: torch.optim.Optimizer) -> None:
        self._check_whole("a backward pass")
        if self._updated:
            self._broken = True
            self._fail(
                f"a backward pass in a step that has updated {len(self._updated)} parameters: {ONE_GRADIENT}"
            )
        # One that broke off before it had updated anything does not count: optimizer.step() does what is left.
        self._task = task
        self._final = not self._only_accumulates and self._passes + 1 >= self._accumulate
        if self._final:
            self._groups = _alone_in_their_bytes(optimizer)
            self._settings = _settings(optimizer)
            self._known = {id(parameter) for parameter in optimizer.state}
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._task = None
        if not self._only_accumulates:
            self._passes += 1

    # Around optimizer.step().

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer is not self._optimizer():
            return None
        self._check_whole("optimizer.step()")
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._prepare(optimizer)
            return None

        def then_prepare() -> Any:
            loss = closure()
            self._check_whole("optimizer.step()")
            self._prepare(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": then_prepare}
        return (args[0], then_prepare, *args[2:]), kwargs

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave in `.grad` what the optimizer's own step has still to do."""
        if self._updated:
            self._check_settings(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            self._check_gradient(parameter)
        self._in_step = True
        for parameter in parameters:
            gradient = parameter.grad
            if type(gradient) is not UsedGradient:
                continue
            if id(parameter) in self._updated:
                self._hidden.append((parameter, gradient))
                parameter.grad = None
            else:  # set to zero, and no gradient since: a step with zeros
                parameter.grad = torch.zeros_like(parameter)

    def _check_gradient(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if id(parameter) in self._updated:
            if gradient is not None and type(gradient) is not UsedGradient:
                self._fail(
                    f"a parameter {describe(parameter)} was updated in the backward pass and was given another "
                    "gradient since"
                )
        elif type(gradient) is UsedGradient and not gradient.zeroed:
            self._fail(
                f"optimizer.step() without a new gradient for a parameter {describe(parameter)}: its last one was used "
                "and freed in the backward pass; call zero_grad() after each step, and step once for each gradient"
            )

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if optimizer is not self._optimizer():
            return
        for parameter, gradient in self._hidden:
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden.clear()
        self._in_step = False
        if self._updated:
            _order_new(optimizer, self._known)
        self._begin_step()
        self._follow(optimizer)

    def _before_state(self, optimizer: torch.optim.Optimizer, *state: Any) -> None:
        if optimizer is self._optimizer() and self._updated:
            self._fail(
                f"the optimizer's state is saved or loaded in a step that has updated {len(self._updated)} parameters: "
                "call optimizer.step() first"
            )

    # Bookkeeping.

    def _begin_step(self) -> None:
        self._passes = 0
        self._updated: dict[int, torch.Tensor] = {}
        self._nested: set[int] = set()  # parameters that a pass within a pass gave a gradient
        self._broken = False
        self._groups.clear()
        self._settings.clear()
        self._updating = None

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the parameters that have come, or require a gradient since. Until then step() does their part."""
        of = weakref.ref(self)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not (parameter.is_leaf and parameter.requires_grad):
                    continue
                hooks = parameter._post_accumulate_grad_hooks
                if hooks is not None and any(isinstance(hook, _Hook) and hook.of() is self for hook in hooks.values()):
                    continue
                for key in [key for key, hook in (hooks or {}).items() if hook is gradients.page_gradient]:
                    del hooks[key]  # this one does it, where a gradient is kept
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(_Hook(of))

    def _check_whole(self, what: str) -> None:
        """Raise where a backward pass or a step broke off with some parameters updated."""
        half = self._broken or self._in_step or (self._task is not None and bool(self._updated))
        if not half:
            return
        where = "optimizer.step()" if self._in_step else "the backward pass"
        amid = "" if self._updating is None else f", in the middle of that of a parameter {describe(self._updating)}"
        self._fail(
            f"{what} after {where} of this step broke off with {len(self._updated)} parameters updated{amid}: call "
            "abandon() on what step_in_backward returned to keep those updates and begin a new step, or load a "
            "checkpoint after it"
        )

    def _check_settings(self, optimizer: torch.optim.Optimizer) -> None:
        for index, (before, group) in enumerate(zip(self._settings, optimizer.param_groups)):
            changed = [name for name, value in before.items() if not _equal(value, group.get(name))]
            if changed:
                self._fail(
                    f"{', '.join(changed)} of group {index} changed between the backward pass, which has updated "
                    f"{len(self._updated)} parameters, and optimizer.step(): set it before backward()"
                )

    def _fail(self, message: str) -> NoReturn:
        raise StepError(f"step_in_backward: {message}")


class _Hook:
    """What a parameter holds. Without its `Stepping` it pages gradients, as without it."""

    __slots__ = ("of",)

    def __init__(self, of: Callable[[], Stepping | None]) -> None:
        self.of = of

    def __call__(self, parameter: torch.Tensor) -> None:
        stepping = self.of()
        if stepping is None:
            gradients.page_gradient(parameter)
        else:
            stepping.receive(parameter)


def _hooks_of(parameter: torch.Tensor) -> list[Any]:
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def _alone_in_their_bytes(optimizer: torch.optim.Optimizer) -> _Groups:
    """Find the parameters that may be updated in the backward pass, with their groups.

    Parameters that share bytes are left out: what one of them is updated with, the other's graph may still have to
    read, and autograd counts their versions apart.
    """
    pairs = [
        (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) is PagedTensor and parameter._region is not None
    ]
    owners = Counter(id(parameter._region) for parameter, _ in pairs)
    return {
        id(parameter): group for parameter, group in pairs if owners[id(parameter._region)] == 1
    }


def _is_nested() -> bool:
    """Whether this backward pass runs within another, as torch.utils.checkpoint with use_reentrant=True does it.

    The outer one may use the same parameters again, so no gradient of the inner one is known to be complete.
    """
    engine = torch.autograd.graph._engine_run_backward.__code__
    frame, count = sys._getframe(), 0
    while frame is not None and count < 2:
        count += frame.f_code is engine
        frame = frame.f_back  # type: ignore[assignment]
    return count > 1


def _order_new(optimizer: torch.optim.Optimizer, known: set[int]) -> None:
    """Put state that is new in the order of the parameters, as a step after the backward pass makes it."""
    if len(optimizer.state) == len(known):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state and id(parameter) not in known:
                optimizer.state[parameter] = optimizer.state.pop(parameter)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
