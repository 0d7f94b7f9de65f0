# SPDX-License-Identifier: Apache-2.0
"""The engines as Python objects: each class owns one handle."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, TypedDict

from typing_extensions import Buffer

class FlashInfo(TypedDict):
    """What was found out when the file was opened; see `pagert_flash_info` in flash.h."""

    capacity_bytes: int
    free_bytes: int
    block_bytes: int
    depth: int
    request_bytes: int
    backend: Literal["io_uring", "threads"]
    direct: bool
    memory_alignment: int
    offset_alignment: int
    reserved: bool
    uring_errno: int
    direct_errno: int
    file_system: int

class FlashFile:
    """One private, nameless file on flash."""

    folder: str
    def __init__(
        self,
        folder: str,
        *,
        capacity_bytes: int,
        block_bytes: int,
        depth: int = 0,
        request_bytes: int = 0,
        backend: str = "auto",
        direct: str = "auto",
        reserve: bool = True,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def info(self) -> FlashInfo: ...
    def run(
        self, requests: Iterable[tuple[Literal["read", "write"], Buffer, int]]
    ) -> list[tuple[int, int]]: ...
    def read(self, buffer: Buffer, offset: int) -> None: ...
    def write(self, buffer: Buffer, offset: int) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> FlashFile: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

class CopyEngine:
    """Threads that fill and copy memory."""

    thread_count: int
    def __init__(self, thread_count: int = 2) -> None: ...
    @property
    def closed(self) -> bool: ...
    def run(self, requests: Iterable[tuple[Literal["fill", "copy"], Buffer, Any]]) -> list[int]: ...
    def close(self) -> None: ...
    def __enter__(self) -> CopyEngine: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

def crc32c(data: Buffer, seed: int = 0) -> int: ...
def crc32c_is_hardware() -> bool: ...
