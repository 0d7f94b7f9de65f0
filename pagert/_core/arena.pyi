# SPDX-License-Identifier: Apache-2.0
"""Memory for the frames of a tier, and what becomes of it in a forked child."""

class Arena:
    """A run of addresses for frames, whatever memory lies behind them."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class MappedArena(Arena):
    """Page-aligned anonymous memory backed by huge pages where the kernel gives them; a buffer."""

    def __init__(self, size_bytes: int) -> None: ...

def format_size(size_bytes: int) -> str:
    """Return a size as text for messages, for example '12 MiB'."""
