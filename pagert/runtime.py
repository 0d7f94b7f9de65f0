# SPDX-License-Identifier: Apache-2.0
"""The runtime of a pager: owns the pump with its core, arenas and engines, and knows no tensor layer."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Any, TypeVar

import torch

from pagert._core.device import CpuDevice
from pagert._core.operation import Turn
from pagert._core.pump import Pump
from pagert.config import Config
from pagert.engines.flash import open_flash
from pagert.errors import PagerClosed
from pagert.stats import Stats

__all__ = ["Runtime"]

_Self = TypeVar("_Self", bound="Runtime")


class Runtime:
    """What a pager is below its tensors: settings, tiers and statistics.

    Parameters
    ----------
    device : str or torch.device
        Compute device; 'auto' is the CPU in this version.
    device_bytes, host_bytes, flash_bytes : int or str
        Budget of each tier: bytes, or text such as '512MiB'. `host_bytes` of 0 or None: no host tier.
    flash_path : path-like or None
        Folder for the flash tier's private file; None: no flash tier.
    page_bytes : int, str or None
        Size of a page; None: 256 KiB, and less where the device budget would hold fewer than 64.
    policy : str
        Eviction policy: 'lookahead', which learns what repeats, or 'lru'.
    flash_depth : int
        Requests in flight at the flash engine; 0: a measured default.
    direct : {'auto', 'require', 'off'}
        Whether flash I/O goes around the OS page cache.
    io_backend : {'auto', 'io_uring', 'threads'}
        How flash requests reach the kernel.
    deadline_seconds, warn_seconds : float
        A wait for bytes warns after `warn_seconds` and raises `TransferTimeout` after `deadline_seconds`.
    copy_threads : int
        Threads that copy between the device and the host tier.
    defer_updates : bool
        Whether a fused optimizer's kernel may run when one of its tensors is next used, which moves its transfers
        behind the next forward pass. The numbers are the same. False: within `optimizer.step()`.

    Raises
    ------
    ConfigurationError
        A setting is out of range, unknown, or does not fit another one.
    OSError
        The flash file cannot be made; `errno` and `filename` are set.
    MemoryError
        The arenas of the device and host tiers cannot be mapped.
    """

    def __init__(
        self,
        *,
        device: str | torch.device = "auto",
        device_bytes: int | str,
        host_bytes: int | str | None = None,
        flash_path: str | os.PathLike[str] | None = None,
        flash_bytes: int | str | None = None,
        page_bytes: int | str | None = None,
        policy: str = "lookahead",
        flash_depth: int = 0,
        direct: str = "auto",
        io_backend: str = "auto",
        deadline_seconds: float = 600.0,
        warn_seconds: float = 30.0,
        copy_threads: int = 2,
        defer_updates: bool = True,
    ) -> None:
        config = Config.resolve(
            device=device,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            flash_path=flash_path,
            flash_bytes=flash_bytes,
            page_bytes=page_bytes,
            policy=policy,
            flash_depth=flash_depth,
            direct=direct,
            io_backend=io_backend,
            deadline_seconds=deadline_seconds,
            warn_seconds=warn_seconds,
            copy_threads=copy_threads,
            defer_updates=defer_updates,
        )
        self.config = config
        self.device = config.device
        self.page_bytes = config.page_bytes
        flash = None
        if config.flash_path is not None:
            flash = open_flash(
                config.flash_path,
                capacity_bytes=config.flash_bytes,
                block_bytes=config.page_bytes,
                depth=config.flash_depth,
                backend=config.io_backend,
                direct=config.direct,
            )
        self.pump = Pump(
            CpuDevice(
                device_bytes=config.device_bytes,
                host_bytes=config.host_bytes,
                copy_threads=config.copy_threads,
            ),
            page_bytes=config.page_bytes,
            page_count=config.page_count,
            flash=flash,
            policy=config.policy,
            transfer_pages_max=config.transfer_pages_max,
            warn_seconds=config.warn_seconds,
            deadline_seconds=config.deadline_seconds,
        )
        # Every dense view is set_() on this one storage: no copy, and the arena lives as long as any of them.
        arena = torch.frombuffer(self.pump.arena, dtype=torch.uint8)
        self.storage: torch.UntypedStorage = arena.untyped_storage()
        self.flat: dict[torch.dtype, torch.Tensor] = {}  # the same as one tensor, once it is asked for
        # Work that waits for somebody to need its tensors, in the order in which it came. See tensor/deferred.py.
        self.deferred: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.defer_updates = config.defer_updates
        self._turn = Turn(self.pump)
        self._settler: int | None = None  # the thread that runs all that is deferred
        self._settled = 0  # how often that was done
        info = self.pump.flash_info
        self._flash_backend = None if info is None else info["backend"]
        self._flash_direct = None if info is None else info["direct"]

    @property
    def closed(self) -> bool:
        """Whether `close()` was called: the tensors have no bytes any more."""
        return self.pump.closed

    def stats(self) -> Stats:
        """Return what the tiers hold and what was moved, in bytes. Does not block on I/O.

        Raises
        ------
        PagerClosed
            After `close()`.
        """
        return Stats.from_state(
            self.pump.state(),
            page_bytes=self.page_bytes,
            flash_backend=self._flash_backend,
            flash_direct=self._flash_direct,
        )

    def reset_stats(self) -> None:
        """Set the counters to zero, and each tier's peak to what it uses now."""
        self.pump.reset_counters()

    def flush(self) -> None:
        """Write every changed page that no operator holds to the tier below. Blocks until that is done.

        Updates that an optimizer has deferred run before. Pages stay resident; evicting them costs nothing afterwards.

        Raises
        ------
        TierFull, TransferError
            A page could not be written. It stays where it is, changed; nothing is lost.
        """
        for work in list(self.deferred.values()):
            work.run()  # or wait until another thread has run it
        self.pump.flush()

    def settle(self) -> bool:
        """Run what is deferred, in the order in which it came. Blocks.

        Returns whether anything was run, by this thread or by another one meanwhile: then there may be room now.
        """
        if self._settler == threading.get_ident():  # by what is deferred itself
            return False
        before = self._settled
        with self._turn:
            waiting = [work for work in list(self.deferred.values()) if work.waits]
            self._settler = threading.get_ident()
            try:
                for work in waiting:
                    work.run()
            finally:
                self._settler = None
                self._settled += bool(waiting)
            return self._settled != before

    def spare_bytes(self) -> int:
        """Return what is free below the device if all that the device holds were written there. May be negative."""
        device, host, flash = self.pump.state()["usage"]
        free_frames = sum(capacity - used for capacity, used, _ in (host, flash))
        return int((free_frames - device[0]) * self.page_bytes)

    def close(self) -> None:
        """Give back the tiers. Blocks until nothing is in flight. Idempotent; tensors are unusable afterwards."""
        self.pump.close()

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise PagerClosed(
                f"{what} needs an open pager, and this one is closed; use it inside its `with` block"
            )

    def __enter__(self: _Self) -> _Self:
        self._check_open("a with block")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
