# SPDX-License-Identifier: Apache-2.0
"""One operator's use of paged tensors, from the collecting of its operands to its end."""

from typing import Any, Protocol

import torch

from pagert._core.pump import Pump

class Fence(Protocol):
    """Says whether work that was begun is done. Does not block."""

    def passed(self) -> bool: ...

class Turn:
    """A reentrant lock whose holder may pin, while who waits for it may hold windows."""

    def __init__(self, pump: Pump) -> None: ...
    def __enter__(self) -> Turn: ...
    def __exit__(self, *exception: object) -> None: ...

class Operation:
    """The paged operands of one call: `collect` or `add`, `pin`, `dense` and `leave`, `end`."""

    def __init__(self, kind: type, name: str) -> None: ...
    @property
    def runtime(self) -> Any:
        """The runtime of all operands; None before the first one."""

    def add(
        self, tensor: torch.Tensor, mode: int, guarded: bool = False, whole: bool = False
    ) -> int:
        """Add one paged tensor."""

    def collect(self, value: Any, mode: int) -> int:
        """Add the paged tensors of one argument: a tensor, a list of tensors or anything else."""

    def pin(self) -> int:
        """Bring every operand to the device and hold it there. Blocks until all are resident."""

    def dense(self, value: Any) -> Any:
        """One argument with its paged tensors replaced by their dense views, valid until the end."""

    def leave(self, result: Any) -> Any:
        """What the operator returned, as its caller may keep it."""

    def end(self, fence: Fence | None = None) -> int:
        """Let every operand go, now or when a fence has passed. Idempotent. Does not block."""

    def __enter__(self) -> Operation: ...
    def __exit__(self, *exception: object) -> None: ...
