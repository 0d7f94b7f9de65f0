# SPDX-License-Identifier: Apache-2.0
"""A file that is replaced whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

__all__ = ["Replacement", "check_room", "force_to_disk"]

_PREFIX, _END = ".", ".partial"


class Replacement:
    """A new file that takes the place of `target` by `commit`.

    Until then it has another name in the same folder, and `target` is what it was. Used as a context manager, it
    removes the new file where it was not committed. One that a killed process left behind is removed by the next
    that is made for the same target: a living one is known by its lock.

    Parameters
    ----------
    target : Path
        Where it goes. Its folder exists.
    whole : Path, optional
        What it is a part of, in the same folder, where that is another file: what was left behind
        is looked for under this name.

    Attributes
    ----------
    size_bytes : int
        What was written so far.
    """

    def __init__(self, target: Path, whole: Path | None = None) -> None:
        self.target = target
        prefix = f"{_PREFIX}{(whole or target).name}."
        _remove_abandoned(target.parent, prefix)
        self._fd, name = tempfile.mkstemp(prefix=prefix, suffix=_END, dir=target.parent)
        self._path: Path | None = Path(name)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(self._fd, _mode(target))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, memory: memoryview | bytes, offset_bytes: int) -> None:
        """Write at a place. Blocks.

        Raises
        ------
        OSError
            As the system gives it, `ENOSPC` with what is free.
        """
        rest = memoryview(memory)
        while len(rest):
            try:
                count = os.pwrite(self._fd, rest, offset_bytes)
            except OSError as error:
                raise _with_room(error, self.target, len(rest)) from error
            rest = rest[count:]
            offset_bytes += count

    def force(self) -> None:
        """Wait until everything that was written is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise _with_room(error, self.target, 0) from error

    def commit(self) -> None:
        """Take the target's place. Call `force` before, and `force_to_disk` on the folder after."""
        assert self._path is not None
        self._path.rename(self.target)
        self._path = None

    def close(self) -> None:
        """Close the file; remove it where it was not committed."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _remove_abandoned(folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        if not (path.name.startswith(prefix) and path.name.endswith(_END)):
            continue
        with contextlib.suppress(OSError):  # somebody writes it, or it is gone meanwhile
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


def check_room(target: Path, needed_bytes: int) -> None:
    """Raise `OSError` (`ENOSPC`) where a file of this size does not fit beside what is there."""
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"saving takes {needed_bytes} bytes beside the previous file, {free_bytes} are free; "
            "free some space, or name a folder on another disk",
            str(target),
        )


def force_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with_room(error: OSError, target: Path, rest_bytes: int) -> OSError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return OSError(error.errno, error.strerror, str(target))
    free_bytes = shutil.disk_usage(target.parent).free
    return OSError(
        error.errno,
        f"{error.strerror}: {free_bytes} bytes are free for the {rest_bytes} or more that are to "
        "be written; what was there before is unchanged: free some space, or name a folder on "
        "another disk",
        str(target),
    )


def _mode(target: Path) -> int:
    """Return the permissions of the file that is replaced, or those of any new one."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
