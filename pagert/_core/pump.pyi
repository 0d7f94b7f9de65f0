# SPDX-License-Identifier: Apache-2.0
"""The pump, its regions and its pins: what the tensor layer builds on."""

from collections.abc import Sequence
from typing import Any

from pagert._core.arena import Arena
from pagert._core.device import Device

READ: int
UPDATE: int
OVERWRITE: int

class Region:
    """A range of virtual pages that backs one storage. Released when its last owner is collected, without a lock."""

    deferred: Any
    """None, or what has to `run()` before anyone looks at the bytes. It must not hold this owner."""

    def share(self) -> Region:
        """Another owner of the same pages, which does not wait for what is deferred."""
    def settle(self) -> None:
        """Run what was deferred. Blocks until it is done; on an error it stays deferred."""
    @property
    def size_bytes(self) -> int: ...
    @property
    def pump(self) -> Pump: ...

class Pin:
    """Ranges that are held resident until `release()`; idempotent. Also a context manager."""

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Offset in the device arena of each access's first byte, in the order asked for."""
    def release(self) -> None: ...
    def __enter__(self) -> Pin: ...
    def __exit__(self, *exception: object) -> None: ...

class Pump:
    """The core, its lock and its thread, over a device, which it then owns. See include/pagert/pump.h.

    Raises pagert's errors: `OutOfFrames` (attributes `needed_bytes`, `unpinned_bytes`,
    `capacity_bytes`), `TierFull`, `TransferError`, `TransferTimeout`, `PagerClosed`. Waits release
    the GIL, let Ctrl-C through, warn after `warn_seconds` and raise after `deadline_seconds`.
    """

    def __init__(
        self,
        device: Device,
        *,
        page_bytes: int,
        page_count: int,
        flash: Any = None,  # an open pagert._core.flash.FlashFile, which the pump then owns
        policy: str = "lru",
        transfer_pages_max: int = 16,
        warn_seconds: float = 30.0,
        deadline_seconds: float = 600.0,
    ) -> None: ...
    recorder: list[Any] | None
    """Where set, each event is appended, in order: for a pin that is ready the list of its (region's number,
    region's size_bytes, offset_bytes, size_bytes, mode), for a region that is reserved (number, size_bytes), for one
    that is collected its number."""

    @property
    def device(self) -> Device: ...
    @property
    def arena(self) -> Arena:
        """The device's."""
    @property
    def page_bytes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def flash_info(self) -> dict[str, Any] | None:
        """What was found out about the flash file, and its folder; None without a flash tier."""
    def reserve(self, size_bytes: int) -> Region: ...
    def pin(self, accesses: Sequence[tuple[Region, int, int, int]]) -> Pin:
        """Hold (region, offset_bytes, size_bytes, mode) ranges, all at once. Blocks until resident.

        Sizes are > 0. Accesses to one region whose pages meet are merged into one window. A region
        of another pump raises `ForeignTensor`.
        """
    def prefetch(self, region: Region, offset_bytes: int, size_bytes: int) -> None: ...
    def evict(self, region: Region, offset_bytes: int, size_bytes: int) -> None: ...
    def flush(self) -> None: ...
    def locate(
        self, region: Region, offset_bytes: int, size_bytes: int
    ) -> tuple[int, int, int, int]:
        """Pages of the range that are zero, on device, on host, on flash (fastest copy)."""
    def state(self) -> dict[str, Any]: ...
    def reset_counters(self) -> None: ...
    def check(self) -> int: ...
    def close(self) -> None: ...
