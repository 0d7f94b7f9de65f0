# SPDX-License-Identifier: Apache-2.0
"""Contestants in processes of their own that take turns, each within a limit of memory where there can be one.

A benchmark's script starts itself again for each contestant. That process prepares, says so, and then does its work
once for every question. In between it sleeps: all are there at once, and nobody runs beside another.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Contestant", "ContestantFailed", "MemoryLimit", "drop_cached", "forget_peak", "limit_memory", "serve",
           "storage_bytes", "thread_seconds"]  # fmt: skip

_FLAG = "--as-contestant"


class ContestantFailed(RuntimeError):
    """The process ended, or said why it cannot take part."""


class MemoryLimit:
    """A memory cgroup for one contestant: what it holds itself, and what the OS keeps of its files."""

    def __init__(self, folder: Path, names: dict[str, str], limit_bytes: int) -> None:
        self._folder = folder
        self._names = names
        self.limit_bytes = limit_bytes
        folder.mkdir()
        try:
            (folder / names["limit"]).write_text(str(limit_bytes))
            if "swap" in names:  # what swaps would not be limited at all
                with contextlib.suppress(OSError):
                    (folder / names["swap"]).write_text(names["no_swap"].format(limit_bytes))
        except OSError:
            folder.rmdir()
            raise

    @property
    def members(self) -> Path:
        """The file that a process writes its number to."""
        return self._folder / "cgroup.procs"

    def peak_bytes(self) -> int | None:
        """The most that it held."""
        try:
            return int((self._folder / self._names["peak"]).read_text())
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Remove it; its processes have ended."""
        for _ in range(50):
            try:
                self._folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # the kernel has not let go of the last process yet
                time.sleep(0.1)


_V1 = {"limit": "memory.limit_in_bytes", "peak": "memory.max_usage_in_bytes", "swap": "memory.memsw.limit_in_bytes",
       "no_swap": "{}"}  # fmt: skip
_V2 = {"limit": "memory.max", "peak": "memory.peak", "swap": "memory.swap.max", "no_swap": "0"}


def limit_memory(name: str, limit_bytes: int) -> tuple[MemoryLimit | None, str]:
    """Make a memory cgroup below our own. None, and the reason, where that cannot be had."""
    reason = "no memory controller is mounted"
    for folder, names in _own_groups():
        try:
            if names is _V2:
                _delegate(folder)
            group = MemoryLimit(folder / f"bench-{os.getpid()}-{name}", names, limit_bytes)
        except OSError as error:
            reason = f"{folder}: {error.strerror}"
            continue
        return group, f"cgroup v{1 if names is _V1 else 2}"
    return None, reason


def _own_groups() -> Iterator[tuple[Path, dict[str, str]]]:
    """Where a group of ours could stand, in either version of the interface."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options = line.split(" ")[:4]
        names = _V2 if kind == "cgroup2" else _V1
        controller = "" if names is _V2 else "memory"
        if kind not in ("cgroup", "cgroup2") or controller not in own:
            continue
        if names is _V1 and "memory" not in options.split(","):
            continue
        # Inside a container the path may not be visible: then the mount itself is our own group.
        below = Path(mount) / own[controller].lstrip("/")
        yield below if below.is_dir() else Path(mount), names


def _delegate(folder: Path) -> None:
    if "memory" not in (folder / "cgroup.subtree_control").read_text().split():
        (folder / "cgroup.subtree_control").write_text("+memory")


def drop_cached(path: Path) -> None:
    """Let the OS forget what it keeps of a file. What is mapped and was touched stays."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def thread_seconds() -> dict[str, float]:
    """Processor time of this process so far, by its threads' names."""
    used: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            spent = int((task / "schedstat").read_text().split()[0]) / 1e9
            name = (task / "comm").read_text().strip()
            used[name] = used.get(name, 0.0) + spent
    return used


def storage_bytes() -> tuple[int, int]:
    """What this process made the storage read and write so far."""
    counts = {}
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        counts[name] = int(value)
    return counts["read_bytes"], counts["write_bytes"]


def forget_peak() -> None:
    """Let the process's peak of memory begin anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Contestant:
    """One process, from this side.

    Parameters
    ----------
    script : str
        The benchmark's own file.
    name : str
        What to prepare there.
    settings : dict
        Handed to it, as JSON.
    limit : MemoryLimit, optional
        It joins before it loads anything.
    """

    def __init__(
        self, script: str, name: str, settings: dict[str, Any], limit: MemoryLimit | None = None
    ) -> None:
        self.name = name
        self.limit = limit
        order = {"name": name, "settings": settings, "join": str(limit.members) if limit else None}
        self._process = subprocess.Popen(
            [sys.executable, script, _FLAG, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, **question: Any) -> dict[str, Any]:
        """Let it work once, and return what it says. Blocks until it is done."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContestantFailed(f"{self.name}: {self._ending()}") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ContestantFailed(f"{self.name}: {self._ending()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise ContestantFailed(f"{self.name}: {answer['failed']}")
        return answer

    def _ending(self) -> str:
        status = self._process.wait()
        killed = " (killed, as when memory runs out)" if status == -9 else ""
        return f"its process ended with status {status}{killed}"

    def close(self) -> None:
        """End the process and remove its limit."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.limit is not None:
            self.limit.close()


# Prepare under these settings; give facts to tell, and the function that answers a question.
Prepare = Callable[
    [dict[str, Any]], "contextlib.AbstractContextManager[tuple[dict[str, Any], Answer]]"
]
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(prepare: dict[str, Prepare]) -> bool:
    """In a contestant's process: prepare, answer until there are no more questions, and say True.

    Call it first thing in the script. False: this is the benchmark itself.
    """
    if len(sys.argv) < 2 or sys.argv[1] != _FLAG:
        return False
    order = json.loads(sys.argv[2])
    if order["join"]:
        Path(order["join"]).write_text(str(os.getpid()))
    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        with prepare[order["name"]](order["settings"]) as (facts, answer):
            say(facts)
            for line in sys.stdin:
                say(answer(json.loads(line)))
    except Exception as error:
        say({"failed": f"{type(error).__name__}: {error}"})
        raise
    return True
