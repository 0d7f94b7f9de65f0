# SPDX-License-Identifier: Apache-2.0
"""What arrives in `__torch_dispatch__`: an operator is run, or looks at the same bytes in another way."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

RUN: int
SMALL: int
VIEW: int
ROUTE: int

class Handling:
    """How one operator is handled: the part of its traits that every call needs."""

    name: str
    way: int
    call: Callable[..., Any]
    written: frozenset[int | str]
    gradients: int | None
    overwrites: Callable[[Sequence[Any], Mapping[str, Any]], bool] | None
    whole: bool
    product: bool
    route: Callable[..., Any] | None
    stream: Callable[..., Any] | None

class Dispatcher:
    """Runs operators on tensors of one class."""

    def __init__(
        self, kind: type, known: dict[Any, Any], analyse: Callable[[Any], Handling], parts: int
    ) -> None: ...
    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What `__torch_dispatch__` does."""

    def run(
        self,
        how: Handling,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        call: Callable[..., Any] | None = None,
    ) -> Any:
        """Pin every paged operand, run the operator, or `call` in its place, on dense views, let go."""

    def copy(self, target: Any, source: Any, mode: int, non_blocking: bool) -> bool:
        """Copy between two tensors, at least one of them paged; False where it is large."""
