# SPDX-License-Identifier: Apache-2.0
"""What stands in `.grad` of a parameter that was updated in the backward pass, in place of its gradient.

It has the gradient's geometry and no bytes. `None` would say that there was no gradient: a norm over all parameters
would come out too small and nobody would know. Whoever reads this is refused by name. What a training loop does to
gradients between steps works: `zero_grad`, both ways, and the backward pass that comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from pagert.errors import StepError, UnsupportedOperator
from pagert.geometry import describe

__all__ = ["ONE_GRADIENT", "UsedGradient"]

ONE_GRADIENT = (
    "call optimizer.step() and zero_grad() after each backward pass; for several in a step give accumulate=, or run "
    "all but the last in `with stepping.accumulating():`; a parameter that torch.utils.checkpoint(use_reentrant=True) "
    "uses again needs use_reentrant=False"
)

_aten = torch.ops.aten


class UsedGradient(torch.Tensor):
    """A gradient that went into its parameter's update, and is gone."""

    _zeroed: bool
    _value: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gradient: torch.Tensor) -> UsedGradient:
        """Make one of the geometry of `gradient`, which it does not keep."""
        used = torch.Tensor._make_wrapper_subclass(
            cls,
            gradient.size(),
            strides=gradient.stride(),
            dtype=gradient.dtype,
            device=gradient.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(used)
        used._zeroed = False
        used._value = None
        return used

    @property
    def zeroed(self) -> bool:
        """Whether it was set to zero since its gradient was used."""
        return self._zeroed

    def take_sum(self) -> torch.Tensor | None:
        """Take what a backward pass has added to it since it was set to zero."""
        value, self._value = self._value, None
        return value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if operator is _aten.zero_.default:
            return args[0]._set_to_zero()
        if operator is _aten._foreach_zero_.default:
            for one in args[0]:
                one._set_to_zero() if type(one) is cls else one.zero_()
            return None
        if operator is _aten.detach.default:
            return cls._like(args[0])
        if operator in (_aten.add_.Tensor, _aten.add.Tensor) and not kwargs and len(args) == 2:
            # What autograd does where a gradient is there already. Zero is added as it would be to a plain gradient
            # that was set to zero: a negative zero becomes a positive one.
            used, gradient = args
            if type(used) is cls and type(gradient) is not cls:
                if used._zeroed:
                    total = gradient + 0 if used._value is None else used._value + gradient
                    if operator is _aten.add.Tensor:
                        return total
                    used._value = total
                    return used
                if torch._C._current_graph_task_id() != -1:
                    raise StepError(
                        f"step_in_backward: a parameter {describe(used)} got another gradient, and its last one was "
                        f"used and freed in a backward pass: {ONE_GRADIENT}"
                    )
        return _refuse(str(operator), next((one for one in _flat(args) if type(one) is cls), None))

    def _set_to_zero(self) -> UsedGradient:
        self._zeroed = True
        self._value = None
        return self

    @classmethod
    def _like(cls, other: UsedGradient) -> UsedGradient:
        result = cls(other)
        result._zeroed, result._value = other._zeroed, other._value
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = ", zeroed" if self._zeroed else ""
        return f"UsedGradient(shape={tuple(self.shape)}, dtype={self.dtype}{state})"

    __str__ = __repr__

    def __deepcopy__(self, memo: dict[int, Any]) -> UsedGradient:
        return memo.setdefault(id(self), self._like(self))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickle", self)

    def tolist(self) -> NoReturn:
        """Refuse by name: there are no bytes."""
        _refuse("tolist()", self)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse by name: there are no bytes."""
        _refuse("numpy()", self)

    def data_ptr(self) -> NoReturn:
        """Refuse by name: there are no bytes."""
        _refuse("data_ptr()", self)

    def untyped_storage(self) -> NoReturn:
        """Refuse by name: there are no bytes."""
        _refuse("untyped_storage()", self)


def _flat(values: Sequence[Any]) -> list[Any]:
    return [
        one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])
    ]


def _refuse(what: str, used: torch.Tensor | None) -> NoReturn:
    of = "" if used is None else f" of a parameter {describe(used)}"
    raise UnsupportedOperator(
        f"{what} needs the gradient{of}, which step_in_backward has used and freed within the backward pass. "
        "What needs all gradients at once (clip_grad_norm_, GradScaler, a norm to print) cannot go with it: call "
        "remove() on what step_in_backward returned, and step after the backward pass"
    )
