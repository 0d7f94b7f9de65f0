# SPDX-License-Identifier: Apache-2.0
"""Contenders that move the same bytes, in interleaved rounds, and the table of what they reached.

The raw ones: plain O_DIRECT loops, fio, memcpy; and the engines alone. A contender moves in two directions: 'read' is
towards the device, 'write' away from it.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _machine import HugeMemory, spread

from pagert._core.flash import CopyEngine, FlashFile

MIB = 1 << 20
JOINED_BYTES = 4 * MIB  # neighbouring pages joined into one request, as the pump does
KINDS = ("write", "read")  # in this order: what is read was written before


@dataclass
class Sizes:
    """How much one pass moves, and how often."""

    file_bytes: int
    memory_bytes: int
    rounds: int


@dataclass
class Contender:
    """One way to move the bytes. Of each round: GB/s, and seconds of processor time a GB."""

    name: str
    baseline: bool = True
    speeds: dict[str, list[float]] = field(default_factory=lambda: {"read": [], "write": []})
    processor: dict[str, list[float]] = field(default_factory=lambda: {"read": [], "write": []})

    def prepare(self, kind: str) -> None:
        """Before each move, and not timed."""

    def move(self, kind: str) -> None:
        """Move all bytes once."""
        raise NotImplementedError

    def seconds(self, kind: str) -> float:
        """Move all bytes once; how long it took."""
        begin = time.perf_counter()
        self.move(kind)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Give everything back."""


class FlashEngine(Contender):
    """libflash, driven in batches; `scattered`: page by page, in no order."""

    def __init__(
        self,
        name: str,
        folder: str,
        sizes: Sizes,
        memory: HugeMemory,
        page_bytes: int,
        scattered: bool = False,
        **options: Any,
    ):
        super().__init__(name, baseline=False)
        self.file = FlashFile(
            folder, capacity_bytes=sizes.file_bytes, block_bytes=page_bytes, **options
        )
        step = page_bytes if scattered else max(JOINED_BYTES, page_bytes)
        self.pieces = memory.pieces(step, sizes.file_bytes)
        if scattered:
            random.Random(1).shuffle(self.pieces)

    def move(self, kind: str) -> None:
        """Run all requests as one batch and look at every result."""
        results = self.file.run([(kind, view, offset) for offset, view in self.pieces])
        assert all(result == 0 for result, _ in results)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class Loop(Contender):
    """preadv and pwritev with O_DIRECT: a plain loop, or one in each of a few threads."""

    def __init__(self, folder: str, sizes: Sizes, memory: HugeMemory, request: int, threads: int):
        super().__init__(f"loop, {threads} x {request // MIB} MiB")
        flags = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT
        self.fd = os.open(folder, flags, 0o600)
        os.posix_fallocate(self.fd, 0, sizes.file_bytes)
        self.shares = [memory.pieces(request, sizes.file_bytes)[k::threads] for k in range(threads)]
        self.pool = ThreadPoolExecutor(threads)

    def move(self, kind: str) -> None:
        """Run the shares at once."""
        call = os.preadv if kind == "read" else os.pwritev

        def walk(share: list[tuple[int, memoryview]]) -> None:
            for offset, view in share:
                assert call(self.fd, [view], offset) == len(view)

        if len(self.shares) == 1:
            walk(self.shares[0])
        else:
            list(self.pool.map(walk, self.shares))

    def close(self) -> None:
        """Close the file, end the threads."""
        self.pool.shutdown()
        os.close(self.fd)


class CopyingLoop(Loop):
    """A loop whose bytes also pass between the memory that it moves and another one: as much as two links do."""

    def __init__(self, folder: str, sizes: Sizes, memory: HugeMemory, request: int, threads: int):
        super().__init__(folder, sizes, memory, request, threads)
        self.name, self.baseline = f"{self.name}, and memcpy", False
        far = np.frombuffer(HugeMemory(len(memory.view)).view, np.uint8)
        near = np.frombuffer(memory.view, np.uint8)
        places = {
            offset: offset % (len(near) // request * request)
            for offset in range(0, sizes.file_bytes, request)
        }
        self.far = {
            offset: (near[at : at + request], far[at : at + request])
            for offset, at in places.items()
        }

    def move(self, kind: str) -> None:
        """Run the shares at once, each piece copied before its write or after its read."""

        def walk(share: list[tuple[int, memoryview]]) -> None:
            for offset, view in share:
                near, far = self.far[offset]
                if kind == "write":
                    np.copyto(near, far)
                    assert os.pwritev(self.fd, [view], offset) == len(view)
                else:
                    assert os.preadv(self.fd, [view], offset) == len(view)
                    np.copyto(far, near)

        list(self.pool.map(walk, self.shares))


def plain_loops(folder: str, sizes: Sizes, memory: HugeMemory) -> list[Contender]:
    """Return the loops that are the baseline wherever there is flash."""
    ways = ((1, 1), (4, 1), (16, 1), (1, 4), (4, 4))
    return [Loop(folder, sizes, memory, request * MIB, threads) for request, threads in ways]


class Fio(Contender):
    """fio, which measures itself."""

    def __init__(self, folder: str, sizes: Sizes, engine: str, depth: int):
        super().__init__(f"fio {engine}, 1 MiB x {depth}")
        self.path = os.path.join(folder, f".bench-fio-{os.getpid()}")
        self.command = [
            *("fio", "--name=bench", f"--filename={self.path}", f"--size={sizes.file_bytes}"),
            *("--bs=1m", "--direct=1", f"--ioengine={engine}", f"--iodepth={depth}"),
            *("--output-format=json", "--fallocate=posix", "--randrepeat=0", "--end_fsync=0"),
        ]
        self.file_bytes = sizes.file_bytes

    def seconds(self, kind: str) -> float:
        """Start fio once; the time that it took for the transfer itself."""
        done = subprocess.run([*self.command, f"--rw={kind}"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or done.stdout.strip()[-200:])
        job = json.loads(done.stdout)["jobs"][0][kind]
        return self.file_bytes / job["bw_bytes"]

    def close(self) -> None:
        """Remove the file."""
        Path(self.path).unlink(missing_ok=True)


def find_fio(folder: str, sizes: Sizes) -> list[Contender]:
    """Return fio with each engine that works here; none where it is not installed."""
    if not shutil.which("fio"):
        print("fio: not installed")
        return []
    listed = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True).stdout.split()
    engines = [name for name in ("io_uring", "libaio") if name in listed]
    return [Fio(folder, sizes, engine, 16) for engine in engines]


class MemoryCopy(Contender):
    """memcpy between two memories: in one call, or in 1 MiB pieces shared by a few threads."""

    def __init__(self, sizes: Sizes, near: HugeMemory, far: HugeMemory, threads: int):
        super().__init__(f"memcpy, {threads} thread{'s' * (threads > 1)}")
        self.ends = tuple(np.frombuffer(memory.view, np.uint8) for memory in (near, far))
        self.cuts = list(range(0, sizes.file_bytes, MIB if threads > 1 else sizes.file_bytes))
        self.step = self.cuts[1] if threads > 1 else sizes.file_bytes
        self.shares = [self.cuts[k::threads] for k in range(threads)]
        self.pool = ThreadPoolExecutor(threads)

    def move(self, kind: str) -> None:
        """Copy all bytes. numpy lets go of the GIL meanwhile."""
        near, far = self.ends
        target, source = (near, far) if kind == "read" else (far, near)

        def walk(share: list[int]) -> None:
            for at in share:
                np.copyto(target[at : at + self.step], source[at : at + self.step])

        list(self.pool.map(walk, self.shares))

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()


class HostEngine(Contender):
    """libcopy, driven in batches."""

    def __init__(self, name: str, sizes: Sizes, near: HugeMemory, far: HugeMemory):
        super().__init__(name, baseline=False)
        self.engine = CopyEngine()
        both = (memory.pieces(JOINED_BYTES, sizes.file_bytes) for memory in (near, far))
        self.pieces = [(one, other) for (_, one), (_, other) in zip(*both, strict=True)]

    def move(self, kind: str) -> None:
        """Run all requests as one batch."""
        pairs = self.pieces if kind == "read" else [(far, near) for near, far in self.pieces]
        assert not any(self.engine.run([("copy", target, source) for target, source in pairs]))

    def close(self) -> None:
        """End the threads."""
        self.engine.close()


def processor_seconds() -> float:
    """Time that the processor spent on this process and on those it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def run_rounds(contenders: list[Contender], sizes: Sizes, seed: int) -> None:
    """Interleave the contenders. The first round allocates and warms up; it does not count."""
    order = random.Random(seed)
    for round_index in range(sizes.rounds + 1):
        for kind in KINDS:
            for contender in order.sample(contenders, len(contenders)):
                contender.prepare(kind)
                before = processor_seconds()
                try:
                    speed = sizes.file_bytes / contender.seconds(kind) / 1e9
                except RuntimeError as error:
                    print(f"{contender.name}: {error}; left out")
                    contenders.remove(contender)
                    contender.close()
                    continue
                if round_index:
                    used = processor_seconds() - before
                    contender.speeds[kind].append(speed)
                    contender.processor[kind].append(used / sizes.file_bytes * 1e9)


def compare(contenders: Sequence[Contender], kind: str) -> dict[str, Any]:
    """Medians and spreads in one direction, each as a part of the best baseline's median too."""
    rows: dict[str, dict[str, float]] = {c.name: spread(c.speeds[kind]) for c in contenders}
    best = max((c for c in contenders if c.baseline), key=lambda c: rows[c.name]["median"])
    for contender in contenders:
        row = rows[contender.name]
        row["ratio"] = row["median"] / rows[best.name]["median"]
        row["processor"] = statistics.median(contender.processor[kind])
    return {"best_baseline": best.name, "contenders": rows}


def print_table(title: str, found: dict[str, Any]) -> None:
    """Print one direction, the fastest first."""
    print(f"\n{title:<42} GB/s: median (min to max)  of the best  processor s/GB")
    rows = found["contenders"]
    for name in sorted(rows, key=lambda name: -rows[name]["median"]):
        row = rows[name]
        values = f"{row['median']:6.2f} ({row['min']:.2f} to {row['max']:.2f})"
        print(f"{name:<46}{values:<24}{row['ratio']:8.2f}{row['processor']:14.3f}")
