# SPDX-License-Identifier: Apache-2.0
"""libcore as it is: a class that owns a core, with no engine, no pump and no bytes behind it."""

from collections.abc import Iterable
from typing import NamedTuple

NONE: int

E_ARGUMENT: int
E_STALE: int
E_PAGES: int
E_FRAMES: int
E_FULL: int
E_STATE: int
E_TRANSFER: int

DEVICE: int
HOST: int
FLASH: int
TIER_COUNT: int

READ: int
UPDATE: int
OVERWRITE: int

FILL: int
MOVE: int
HOST_TO_DEVICE: int
FLASH_TO_DEVICE: int
FLASH_TO_HOST: int
DEVICE_TO_HOST: int
DEVICE_TO_FLASH: int
HOST_TO_FLASH: int
LINK_COUNT: int
ALL_LINKS: int

ZERO: int
ABSENT: int
FETCHING: int
RESIDENT: int
WRITING_BACK: int
FREE: int

class RegionHandle(NamedTuple):
    first_page: int
    generation: int

class Transfer(NamedTuple):
    link: int
    first_page: int
    page_count: int
    source_frame: int
    target_frame: int

class Failure(NamedTuple):
    page: int
    link: int
    result: int

class PinnedAccess(NamedTuple):
    first_page: int
    page_count: int
    device_bytes: int

class Residency(NamedTuple):
    zero: int
    device: int
    host: int
    flash: int

class Counters(NamedTuple):
    hits: int
    faults: int
    evictions: int
    prefetches: int
    transferred: tuple[int, ...]
    transfers: tuple[int, ...]
    failed_transfers: int
    lru_moved: int

class Usage(NamedTuple):
    capacity_frames: int
    used_frames: int
    peak_frames: int

class PageInfo(NamedTuple):
    state: int
    frame: tuple[int, int, int]
    holds: int
    dirty: int

class CoreError(Exception):
    code: int
    failure: Failure | None
    frames_needed: int
    frames_unheld: int
    def __init__(
        self,
        code: int,
        failure: Failure | None = None,
        frames_needed: int = 0,
        frames_unheld: int = 0,
    ) -> None: ...

def policy_names() -> tuple[str, ...]:
    """Return the name of each eviction policy."""

def memory_bytes(
    *,
    page_bytes: int,
    page_count: int,
    device_frames: int,
    host_frames: int = 0,
    flash_frames: int = 0,
    transfer_pages_max: int = 1,
    policy: str = "lru",
) -> int: ...

class Core:
    """One core and the memory it lives in, mapped lazily. Single-threaded, as the core is."""

    def __init__(
        self,
        *,
        page_bytes: int,
        page_count: int,
        device_frames: int,
        host_frames: int = 0,
        flash_frames: int = 0,
        transfer_pages_max: int = 1,
        policy: str = "lru",
        memory_bytes: int | None = None,
    ) -> None: ...
    @property
    def memory_bytes(self) -> int: ...
    def reserve(self, size_bytes: int) -> RegionHandle: ...
    def release(self, region: tuple[int, int]) -> None: ...
    def pin(self, accesses: Iterable[tuple[tuple[int, int], int, int, int]]) -> CorePin: ...
    def prefetch(
        self, region: tuple[int, int], offset_bytes: int, size_bytes: int
    ) -> bool: ...
    def look_ahead(self, backlog_max: int) -> int: ...
    def evict(self, region: tuple[int, int], offset_bytes: int, size_bytes: int) -> int: ...
    def flush(self) -> int: ...
    def next_transfer(self, link_mask: int = ...) -> Transfer | None: ...
    def complete(self, transfer: tuple[int, int, int, int, int], result: int = 0) -> None: ...
    def locate(self, region: tuple[int, int], offset_bytes: int, size_bytes: int) -> Residency: ...
    def counters(self) -> Counters: ...
    def usage(self, tier: int) -> Usage: ...
    def reset_counters(self) -> None: ...
    @property
    def held_frames(self) -> int: ...
    @property
    def reserved_pages(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def is_idle(self) -> bool: ...
    def page(self, page: int) -> PageInfo: ...
    def check(self) -> int: ...

class CorePin:
    """The C pin and its accesses. Made by `Core.pin`; let go of by `release`, or when collected."""

    @property
    def ready(self) -> bool: ...
    @property
    def accesses(self) -> tuple[PinnedAccess, ...]: ...
    def poll(self) -> bool: ...
    def restart(self) -> None: ...
    def release(self) -> None: ...
