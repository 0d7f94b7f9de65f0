# SPDX-License-Identifier: Apache-2.0
"""The short way of an operator on paged tensors: pin, run, let go, or another look at the same bytes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagert._core.pump import Pump

class Turn:
    """A reentrant lock whose holder may pin, while who waits for it may hold windows."""

    def __init__(self, pump: Pump) -> None: ...
    def __enter__(self) -> Turn: ...
    def __exit__(self, *exception: object) -> None: ...

class Footprint:
    """A tensor's bytes in its region, and the dense view of its last call."""

class Operation:
    """The paged operands of one call."""

class Dispatcher:
    """Runs operators on tensors of one class."""

    def __init__(
        self,
        kind: type,
        plans: dict[Any, Any],
        make_plan: Callable[[Any], Any],
        geometry: Callable[[Any], Any],
        flat: Callable[[Any, Any], Any],
        leave: Callable[..., Any],
        parts: int,
    ) -> None: ...
    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What `__torch_dispatch__` does."""

    def copy(self, target: Any, source: Any, mode: int, non_blocking: bool) -> bool:
        """Copy between two tensors, at least one of them paged; False where it is not simple."""
