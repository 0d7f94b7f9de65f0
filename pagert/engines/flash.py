# SPDX-License-Identifier: Apache-2.0
"""Opening the flash tier's file: exceptions with a remedy, and a word about every fallback."""

from __future__ import annotations

import errno
import logging
import os
import resource
from typing import TYPE_CHECKING

from pagert._core.flash import FlashFile

if TYPE_CHECKING:
    from pagert._core.flash import FlashInfo

__all__ = ["open_flash"]

_log = logging.getLogger("pagert.flash")

# f_type of file systems whose files take memory, from linux/magic.h.
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}


def open_flash(
    folder: str | os.PathLike[str],
    *,
    capacity_bytes: int,
    block_bytes: int,
    depth: int = 0,
    request_bytes: int = 0,
    backend: str = "auto",
    direct: str = "auto",
    reserve: bool = True,
) -> FlashFile:
    """Create a private, nameless file in a folder and open it for many requests at once.

    Writes one block to find out how the file system takes direct I/O, so it blocks for a moment;
    with `reserve` also for the allocation of the space. Fallbacks are logged once each, as warnings
    of the logger ``pagert.flash``.

    Parameters
    ----------
    folder : path-like
        An existing folder that can be written to.
    capacity_bytes : int
        Size of the file; a multiple of `block_bytes`.
    block_bytes : int
        Unit of offsets, sizes and checksums; a multiple of 4096.
    depth : int
        Pieces in flight at once; 0: a measured default.
    request_bytes : int
        Larger requests are cut into pieces of this size; 0: a measured default.
    backend : {'auto', 'io_uring', 'threads'}
        How requests reach the kernel. 'auto': io_uring for direct I/O, threads for buffered I/O and
        where io_uring is refused.
    direct : {'auto', 'require', 'off'}
        Whether I/O goes around the OS page cache. 'auto': where a real write and read prove that it
        works.
    reserve : bool
        Allocate the space now, so that a full disk shows at once.

    Returns
    -------
    FlashFile
        Its `info` says what was found out and chosen.

    Raises
    ------
    ValueError
        An option is out of range.
    OSError
        The file cannot be made, with `errno` and `filename` set: the folder is missing
        (`FileNotFoundError`), no folder (`NotADirectoryError`), not writable (`PermissionError`, or
        EROFS), too little space is free (ENOSPC), or what was required is refused.

    Examples
    --------
    >>> import tempfile
    >>> with open_flash(tempfile.gettempdir(), capacity_bytes=1 << 20, block_bytes=4096) as file:
    ...     file.write(b"x" * 4096, 8192)
    ...     back = bytearray(4096)
    ...     file.read(back, 8192)
    >>> back == b"x" * 4096
    True
    """
    path = os.fsdecode(folder)
    _check_options(capacity_bytes, block_bytes, depth, request_bytes, backend, direct)
    try:
        file = FlashFile(
            path,
            capacity_bytes=capacity_bytes,
            block_bytes=block_bytes,
            depth=depth,
            request_bytes=request_bytes,
            backend=backend,
            direct=direct,
            reserve=reserve,
        )
    except OSError as error:
        raise _explained(error, path, capacity_bytes, backend, direct) from error
    _report(file.info, path, backend, direct, reserve)
    return file


def _check_options(
    capacity_bytes: int, block_bytes: int, depth: int, request_bytes: int, backend: str, direct: str
) -> None:
    if block_bytes <= 0 or block_bytes % 4096 or block_bytes > 1 << 30:
        raise ValueError(
            f"block_bytes is {block_bytes}; give a multiple of 4096 up to {1 << 30} (1 GiB)"
        )
    if capacity_bytes <= 0 or capacity_bytes % block_bytes or capacity_bytes >= 1 << 63:
        raise ValueError(
            f"capacity_bytes is {capacity_bytes}; give a positive multiple of block_bytes, "
            f"which is {block_bytes}"
        )
    if not 0 <= depth <= 4096:
        raise ValueError(f"depth is {depth}; give 1 to 4096, or 0 for the default")
    if not 0 <= request_bytes <= 1 << 30:
        raise ValueError(
            f"request_bytes is {request_bytes}; give up to {1 << 30} (1 GiB), or 0 for the default"
        )
    if backend not in ("auto", "io_uring", "threads"):
        raise ValueError(f"backend is {backend!r}; allowed are 'auto', 'io_uring' and 'threads'")
    if direct not in ("auto", "require", "off"):
        raise ValueError(f"direct is {direct!r}; allowed are 'auto', 'require' and 'off'")


def _explained(
    error: OSError, path: str, capacity_bytes: int, backend: str, direct: str
) -> OSError:
    """Return the same error with what was wanted, what there is, and what to do."""
    code = error.errno or errno.EIO
    reason = os.strerror(code)
    if code in (errno.ENOSPC, errno.EDQUOT):
        text = (
            f"{reason}: the flash file needs {capacity_bytes} bytes, {_free_bytes(path)} are free; "
            "free space there, lower flash_bytes, or give another folder"
        )
    elif code == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        text = (
            f"{reason}: the flash file needs {capacity_bytes} bytes, the limit for files of this "
            f"process is {limit} (RLIMIT_FSIZE); raise it (ulimit -f) or lower flash_bytes"
        )
    elif code == errno.ENOENT:
        text = f"{reason}: the folder for the flash file is missing; create it first"
    elif code == errno.ENOTDIR:
        text = f"{reason}: the flash file needs a folder; give the folder that it shall lie in"
    elif code in (errno.EACCES, errno.EROFS) or (code == errno.EPERM and backend != "io_uring"):
        text = f"{reason}: the flash file cannot be created; give a folder that can be written to"
    elif direct == "require" and code in (errno.EINVAL, errno.EOPNOTSUPP):
        text = (
            f"{reason}: the file system refuses direct I/O (O_DIRECT), which direct='require' asks "
            "for; use direct='auto' for buffered I/O, or another file system"
        )
    elif backend == "io_uring":
        text = (
            f"{reason}: {_uring_reason(code)}; use backend='auto' to fall back to threads, "
            "or allow it"
        )
    else:
        text = f"{reason}: the flash file of {capacity_bytes} bytes cannot be opened"
    return type(error)(code, text, path)


def _free_bytes(path: str) -> int:
    try:
        facts = os.statvfs(path)
    except OSError:
        return 0
    return facts.f_bavail * facts.f_frsize


def _uring_reason(code: int) -> str:
    if code == errno.EPERM:
        return (
            "io_uring is forbidden, by a seccomp filter (container runtimes block it by default) "
            "or by the sysctl kernel.io_uring_disabled"
        )
    if code == errno.ENOSYS:
        return "the kernel has no io_uring, or a seccomp filter hides it"
    if code == errno.ENOMEM:
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return (
            "io_uring found no memory for its ring; on kernels before 5.12 it counts as locked "
            f"memory, whose limit is {soft} (hard {hard}; ulimit -l)"
        )
    return f"io_uring cannot be used ({os.strerror(code)})"


def _report(info: FlashInfo, path: str, backend: str, direct: str, reserve: bool) -> None:
    """Log what is not as one would wish."""
    kind = _IN_MEMORY.get(info["file_system"])
    if kind:
        _log.warning(
            "the flash file in %s lies in memory (%s): its %d bytes count against RAM; "
            "give a folder on a disk",
            *(path, kind, info["capacity_bytes"]),
        )
    if info["direct_errno"]:
        _log.warning(
            "the file system of %s refuses direct I/O (%s): flash goes through the OS page cache",
            *(path, os.strerror(info["direct_errno"])),
        )
    if info["uring_errno"]:
        _log.warning("%s: flash uses threads", _uring_reason(info["uring_errno"]))
    if reserve and not info["reserved"]:
        _log.warning(
            "the file system of %s cannot allocate space in advance: a full disk will show only "
            "when pages are written",
            path,
        )
    _log.info(
        "flash file in %s: %d bytes, %s, %s I/O, depth %d, pieces of %d bytes",
        *(path, info["capacity_bytes"], info["backend"]),
        *("direct" if info["direct"] else "buffered", info["depth"], info["request_bytes"]),
    )
