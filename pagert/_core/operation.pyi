# SPDX-License-Identifier: Apache-2.0
"""The short way of an operator whose paged operands are few and plain."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagert._core.pump import Region

class Footprint:
    """The bytes that a tensor touches in its region, and the dense view of its last call."""

    def __init__(self, region: Region, offset_bytes: int, size_bytes: int) -> None: ...

class Dispatcher:
    """Runs operators on tensors of one class."""

    def __init__(
        self,
        kind: type,
        plans: dict[Any, Any],
        make_plan: Callable[[Any], Any],
        footprint: Callable[[Any], Footprint | None],
        dense_view: Callable[[Any, int], Any],
        leave: Callable[..., Any],
        tensor_type: type,
        strided: Any,
    ) -> None: ...
    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What `__torch_dispatch__` does."""
