# SPDX-License-Identifier: Apache-2.0
"""The settings of a pager: checked once, when the pager is made, and never changed after."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch

from pagert._core.core import policy_names
from pagert.errors import ConfigurationError, ConfigurationTypeError
from pagert.sizes import format_bytes, parse_bytes, whole_number

__all__ = ["POLICIES", "Config", "format_bytes", "parse_bytes"]

POLICIES = policy_names()
"""Eviction policies by name: those of the core."""

DirectMode = Literal["auto", "require", "off"]
IoBackend = Literal["auto", "io_uring", "threads"]

_PAGE_BYTES_MIN = 4096
_PAGE_BYTES_MAX = 2**30
_PAGE_BYTES_DEFAULT = 256 * 2**10
# Below this many frames, rounding each operand up to whole pages would take a large part of the
# budget.
_FRAMES_WANTED = 64

# The core counts pages and frames in 32 bits, and keeps the largest number for 'none'.
_INDEX_MAX = 2**32 - 2

# Neighbouring pages are joined up to this size: a disk that serves one request after the other writes
# at 0.92 of its best with 4 MiB, and at 0.99 with this (bench/tiers.py).
_TRANSFER_BYTES = 16 * 2**20

_FLASH_DEPTH_MAX = 4096
_COPY_THREADS_MAX = 64


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one pager, as `Config.resolve` checked and completed them.

    Attributes
    ----------
    device : torch.device
        Where operators compute.
    device_bytes, host_bytes, flash_bytes : int
        Budget of each tier in bytes, a multiple of `page_bytes`; 0: the tier is not configured.
    flash_path : str or None
        Absolute path of the folder for the flash tier's file; None: no flash tier.
    page_bytes : int
        Size of a page; a power of two, at least 4096.
    policy : str
        Eviction policy, one of `POLICIES`.
    flash_depth : int
        Requests in flight at the flash engine at once; 0: the engine's own default.
    direct : str
        Whether flash I/O goes around the OS page cache: 'auto' (where the file system allows it),
        'require' or 'off'.
    io_backend : str
        How flash requests reach the kernel: 'auto', 'io_uring' or 'threads'.
    deadline_seconds, warn_seconds : float
        A wait for bytes warns after `warn_seconds` and raises after `deadline_seconds`.
    copy_threads : int
        Threads that copy between the device and the host tier.
    defer_updates : bool
        Whether a fused optimizer's kernel may run when one of its tensors is next used.
    """

    device: torch.device
    device_bytes: int
    host_bytes: int
    flash_path: str | None
    flash_bytes: int
    page_bytes: int
    policy: str
    flash_depth: int = 0
    direct: DirectMode = "auto"
    io_backend: IoBackend = "auto"
    deadline_seconds: float = 600.0
    warn_seconds: float = 30.0
    copy_threads: int = 2
    defer_updates: bool = True

    @classmethod
    def resolve(
        cls,
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
    ) -> Config:
        """Check every setting, fill in the defaults, and round the budgets down to whole pages.

        Parameters
        ----------
        device : str or torch.device
            'auto', 'cpu' or 'cuda:N'. 'auto' is the CPU: this version computes on the CPU only.
        device_bytes, host_bytes, flash_bytes : int or str
            Budgets as `parse_bytes` reads them. `host_bytes` of 0 or None: no host tier.
        flash_path : path-like or None
            A folder that exists and can be written to; goes with `flash_bytes`. None: no flash
            tier.
        page_bytes : int, str or None
            None: 256 KiB, and less where the device budget would hold fewer than 64 such pages.
        policy, flash_depth, direct, io_backend, deadline_seconds, warn_seconds, copy_threads,
        defer_updates
            See the attributes.

        Raises
        ------
        ConfigurationError
            A value is out of range, unknown, or does not fit another one. The message has the
            value, the limit and the remedy.
        ConfigurationTypeError
            A value has the wrong type. It is a `ConfigurationError` too.

        Examples
        --------
        >>> config = Config.resolve(device_bytes="1MiB", host_bytes="64MiB")
        >>> config.page_bytes, config.device_frames, config.host_frames, config.flash_frames
        (16384, 64, 4096, 0)
        """
        compute_device = _resolve_device(device)
        device_size = parse_bytes(device_bytes, name="device_bytes")
        host_size = 0 if host_bytes is None else parse_bytes(host_bytes, name="host_bytes")
        flash_size = 0 if flash_bytes is None else parse_bytes(flash_bytes, name="flash_bytes")
        folder = _resolve_flash(flash_path, flash_bytes, flash_size)
        if device_size == 0:
            raise ConfigurationError(
                "device_bytes is 0; the device tier needs at least one page; "
                "give the memory that operators may use, for example '512MiB'"
            )
        if host_size == 0 and folder is None:
            raise ConfigurationError(
                "no tier lies below the device: host_bytes and flash_path are both unset; "
                "give host_bytes, or flash_path with flash_bytes"
            )
        page_size = _resolve_page_bytes(page_bytes, device_size)
        config = cls(
            device=compute_device,
            device_bytes=_whole_pages(device_size, page_size, "device_bytes"),
            host_bytes=_whole_pages(host_size, page_size, "host_bytes"),
            flash_path=folder,
            flash_bytes=_whole_pages(flash_size, page_size, "flash_bytes"),
            page_bytes=page_size,
            policy=_one_of(policy, "policy", POLICIES),
            flash_depth=_count(flash_depth, "flash_depth", 0, _FLASH_DEPTH_MAX),
            direct=cast(DirectMode, _one_of(direct, "direct", get_args(DirectMode))),
            io_backend=cast(IoBackend, _one_of(io_backend, "io_backend", get_args(IoBackend))),
            deadline_seconds=_seconds(deadline_seconds, "deadline_seconds"),
            warn_seconds=_seconds(warn_seconds, "warn_seconds"),
            copy_threads=_count(copy_threads, "copy_threads", 1, _COPY_THREADS_MAX),
            defer_updates=_flag(defer_updates, "defer_updates"),
        )
        frames = config.device_frames + config.host_frames + config.flash_frames
        if frames > _INDEX_MAX:
            raise ConfigurationError(
                f"the tiers together have {frames} frames of {format_bytes(page_size)}; "
                f"the limit is {_INDEX_MAX}; raise page_bytes or lower the budgets"
            )
        return config

    @property
    def device_frames(self) -> int:
        """Frames of the device tier."""
        return self.device_bytes // self.page_bytes

    @property
    def host_frames(self) -> int:
        """Frames of the host tier; 0 without one."""
        return self.host_bytes // self.page_bytes

    @property
    def flash_frames(self) -> int:
        """Frames of the flash tier; 0 without one."""
        return self.flash_bytes // self.page_bytes

    @property
    def page_count(self) -> int:
        """Virtual pages of the address space.

        Every written page lies in a frame, so there are never more of them than frames. What comes
        on top needs no frame: pages that were never written (optimizer state before its first step,
        a gradient about to be made), and the gaps that regions of unequal sizes leave as they come
        and go, because a region is contiguous. Four times the frames leaves room for both, and a
        million pages beside them does so where budgets are tiny and tensors many. Being generous
        costs address space only: a virtual page's entry takes memory when it is first used.
        """
        frames = self.device_frames + self.host_frames + self.flash_frames
        return min(4 * frames + 2**20, _INDEX_MAX)

    @property
    def transfer_pages_max(self) -> int:
        """Neighbouring pages that are joined into one transfer."""
        return max(1, _TRANSFER_BYTES // self.page_bytes)


def _flag(value: bool, name: str) -> bool:
    if type(value) is not bool:
        raise ConfigurationTypeError(f"{name} is {value!r}; give True or False")
    return value


def _count(number: int, name: str, least: int, most: int) -> int:
    count = whole_number(number, name, "a whole number")
    if not least <= count <= most:
        raise ConfigurationError(f"{name} is {count}; give a number from {least} to {most}")
    return count


def _seconds(number: float, name: str) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ConfigurationTypeError(
            f"{name} is {number!r} of type {type(number).__name__}; give a number of seconds"
        )
    try:
        seconds = float(number)
    except OverflowError:
        seconds = math.inf
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigurationError(f"{name} is {number!r}; give a positive, finite number of seconds")
    return seconds


def _one_of(choice: str, name: str, allowed: tuple[str, ...]) -> str:
    if not isinstance(choice, str):
        raise ConfigurationTypeError(
            f"{name} is {choice!r} of type {type(choice).__name__}; give one of the names "
            f"{', '.join(map(repr, allowed))}"
        )
    if choice not in allowed:
        raise ConfigurationError(f"{name} is {choice!r}; allowed: {', '.join(map(repr, allowed))}")
    return choice


def _resolve_device(device: str | torch.device) -> torch.device:
    if not isinstance(device, (str, torch.device)):
        raise ConfigurationTypeError(
            f"device is {device!r} of type {type(device).__name__}; "
            "give 'auto', 'cpu' or a torch.device"
        )
    if device == "auto":
        return torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigurationError(
            f"device is {device!r}, which PyTorch does not know; give 'auto' or 'cpu'"
        ) from None
    if found.type != "cpu":
        raise ConfigurationError(
            f"device is '{found}'; this version computes on the CPU only; give 'auto' or 'cpu'"
        )
    return torch.device("cpu")


def _resolve_flash(
    path: str | os.PathLike[str] | None, flash_bytes: int | str | None, flash_size: int
) -> str | None:
    if path is None:
        if flash_size:
            raise ConfigurationError(
                f"flash_bytes is {flash_bytes!r} but flash_path is unset; "
                "give the folder for the flash tier's file, or leave flash_bytes out"
            )
        return None
    try:
        folder = os.path.abspath(os.fsdecode(path))
    except TypeError:
        raise ConfigurationTypeError(
            f"flash_path is {path!r} of type {type(path).__name__}; give the path of a folder"
        ) from None
    if not os.fspath(path) or "\0" in folder:
        raise ConfigurationError(f"flash_path is {path!r}; give the path of a folder")
    if not flash_size:
        raise ConfigurationError(
            f"flash_path is {folder!r} but flash_bytes is "
            f"{'unset' if flash_bytes is None else repr(flash_bytes)}; "
            "give the budget of the flash tier, for example flash_bytes='64GiB'"
        )
    if not os.path.exists(folder):
        raise ConfigurationError(f"flash_path {folder!r} does not exist; create the folder first")
    if not os.path.isdir(folder):
        raise ConfigurationError(f"flash_path {folder!r} is not a folder; give a folder")
    try:
        # Making a file is the only sure test: permission bits neither tell of a read-only file
        # system nor stop root. The file has no name, so that nothing can be left behind.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"flash_path {folder!r} cannot be written to ({error.strerror}); "
            "give a folder on a writable file system and with permission to create files"
        ) from error
    return folder


def _resolve_page_bytes(page_bytes: int | str | None, device_size: int) -> int:
    if page_bytes is None:
        size = _PAGE_BYTES_DEFAULT
        while size > _PAGE_BYTES_MIN and device_size // size < _FRAMES_WANTED:
            size //= 2
        return size
    size = parse_bytes(page_bytes, name="page_bytes")
    if not _PAGE_BYTES_MIN <= size <= _PAGE_BYTES_MAX or size & (size - 1):
        raise ConfigurationError(
            f"page_bytes is {page_bytes!r}; give a power of two from {_PAGE_BYTES_MIN} "
            f"to {_PAGE_BYTES_MAX}, or None for the default"
        )
    return size


def _whole_pages(size_bytes: int, page_bytes: int, name: str) -> int:
    if 0 < size_bytes < page_bytes:
        raise ConfigurationError(
            f"{name} is {size_bytes} bytes, less than one page of {page_bytes} bytes; "
            f"raise {name}" + (" or lower page_bytes" if page_bytes > _PAGE_BYTES_MIN else "")
        )
    return size_bytes - size_bytes % page_bytes
