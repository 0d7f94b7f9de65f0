# SPDX-License-Identifier: Apache-2.0
"""The flash engine beside raw baselines, in one run.

Every contender moves the same number of bytes, sequentially, between a file of its own on the same
file system and the same memory (2 MiB aligned, huge pages, faulted in; fio and DeepSpeed have their
own). The rounds are interleaved, and shuffled within a round, so that a slow moment of the
machine hits all alike. The engine computes and verifies checksums; the baselines do not.

    python bench/flash.py [--folder DIR] [--smoke] [--json FILE] [--sweep]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagert._core.flash import FlashFile, crc32c, crc32c_is_hardware

sys.path.insert(0, str(Path(__file__).parent))
from _machine import HugeMemory, machine_facts, spread

MIB = 1 << 20
PAGE_BYTES = 256 << 10
JOINED_BYTES = 4 * MIB  # neighbouring pages joined into one request, as the pump does


@dataclass
class Sizes:
    """How much one pass moves, and how often."""

    file_bytes: int
    memory_bytes: int
    rounds: int


FULL = Sizes(file_bytes=1024 * MIB, memory_bytes=256 * MIB, rounds=7)
SMOKE = Sizes(file_bytes=64 * MIB, memory_bytes=32 * MIB, rounds=2)


@dataclass
class Contender:
    """One way to move the bytes. Of each round: GB/s, and seconds of processor time a GB."""

    name: str
    baseline: bool = True
    speeds: dict[str, list[float]] = field(default_factory=lambda: {"read": [], "write": []})
    processor: dict[str, list[float]] = field(default_factory=lambda: {"read": [], "write": []})

    def move(self, kind: str) -> None:
        """Move the whole file once."""
        raise NotImplementedError

    def seconds(self, kind: str) -> float:
        """Move the whole file once; how long it took."""
        begin = time.perf_counter()
        self.move(kind)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Give everything back."""


class Engine(Contender):
    """libflash, driven in batches."""

    def __init__(self, name: str, folder: str, sizes: Sizes, memory: HugeMemory, **options: Any):
        super().__init__(name, baseline=False)
        self.file = FlashFile(
            folder, capacity_bytes=sizes.file_bytes, block_bytes=PAGE_BYTES, **options
        )
        self.pieces = memory.pieces(JOINED_BYTES, sizes.file_bytes)

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


class AioHandle(Contender):
    """DeepSpeed's aio_handle, in its own pinned memory."""

    def __init__(self, folder: str, sizes: Sizes, handle: Any, torch: Any):
        super().__init__("DeepSpeed aio_handle, 1 MiB x 32, 2 threads")
        self.path = os.path.join(folder, f".bench-aio-{os.getpid()}")
        self.handle = handle(
            block_size=MIB, queue_depth=32, single_submit=False, overlap_events=True,
            intra_op_parallelism=2,
        )  # fmt: skip
        self.tensor = torch.empty(sizes.file_bytes, dtype=torch.uint8)
        if hasattr(self.handle, "new_cpu_locked_tensor"):
            self.tensor = self.handle.new_cpu_locked_tensor(sizes.file_bytes, self.tensor)
        self.tensor.fill_(1)

    def move(self, kind: str) -> None:
        """Read or write the whole tensor."""
        if kind == "read":
            self.handle.sync_pread(self.tensor, self.path)
        else:
            self.handle.sync_pwrite(self.tensor, self.path)

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


def find_deepspeed(folder: str, sizes: Sizes) -> list[Contender]:
    """Return DeepSpeed's handle where it can be imported and built."""
    try:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return [AioHandle(folder, sizes, AsyncIOBuilder().load().aio_handle, torch)]
    except Exception as error:
        print(f"DeepSpeed aio_handle: not usable ({type(error).__name__})")
        return []


def processor_seconds() -> float:
    """Time that the processor spent on this process and on those it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def run_rounds(contenders: list[Contender], sizes: Sizes, seed: int) -> None:
    """Interleave the contenders. The first round allocates and warms up; it does not count."""
    order = random.Random(seed)
    for round_index in range(sizes.rounds + 1):
        for kind in ("write", "read"):
            for contender in order.sample(contenders, len(contenders)):
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


def report(contenders: list[Contender], sizes: Sizes) -> dict[str, Any]:
    """Print the table; the figures as a dict."""
    figures: dict[str, Any] = {}
    for kind in ("read", "write"):
        rows = {c.name: spread(c.speeds[kind]) for c in contenders}
        best = max((c for c in contenders if c.baseline), key=lambda c: rows[c.name]["median"])
        limit = rows[best.name]["median"]
        title = f"{kind}, {sizes.file_bytes // MIB} MiB"
        print(f"\n{title:<38} GB/s: median (min to max)  of the best  processor s/GB")
        for contender in sorted(contenders, key=lambda c: -rows[c.name]["median"]):
            row = rows[contender.name]
            row["ratio"] = row["median"] / limit
            row["processor"] = statistics.median(contender.processor[kind])
            values = f"{row['median']:6.2f} ({row['min']:.2f} to {row['max']:.2f})"
            print(f"{contender.name:<42}{values:<24}{row['ratio']:8.2f}{row['processor']:14.3f}")
        figures[kind] = {"best_baseline": best.name, "contenders": rows}
    print()
    for kind, found in figures.items():
        ratio = found["contenders"]["engine, defaults"]["ratio"]
        print(
            f"{kind}: the engine reaches {ratio:.2f} of '{found['best_baseline']}' (wanted: 0.90)"
        )
    return figures


def checksum_speed() -> float:
    """GB/s of CRC32C over memory that no cache holds."""
    memory = HugeMemory(128 * MIB)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        crc32c(memory.view)
        best = max(best, len(memory.view) / (time.perf_counter() - begin) / 1e9)
    return best


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and print; the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".", help="where the files lie (default: here)")
    parser.add_argument("--smoke", action="store_true", help="small and quick: does it run at all")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--sweep", action="store_true", help="several depths and request sizes too")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    sizes = SMOKE if chosen.smoke else FULL
    if chosen.rounds:
        sizes.rounds = chosen.rounds

    memory = HugeMemory(sizes.memory_bytes)
    facts = machine_facts(chosen.folder)
    facts["arena"] = f"{sizes.memory_bytes // MIB} MiB, {memory.huge_fraction():.0%} in huge pages"
    facts["crc32c"] = (
        f"{checksum_speed():.1f} GB/s, {'hardware' if crc32c_is_hardware() else 'portable'}"
    )
    for key, value in facts.items():
        print(f"{key:>16}: {value}")

    folder = chosen.folder
    contenders: list[Contender] = [
        Engine("engine, defaults", folder, sizes, memory),
        Engine("engine, threads", folder, sizes, memory, backend="threads"),
    ]
    if chosen.sweep:
        for depth in (8, 16, 32, 64):
            for request in (MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB):
                name = f"engine, {depth} x {request / MIB:g} MiB"
                options = {"depth": depth, "request_bytes": request, "backend": "io_uring"}
                contenders.append(Engine(name, folder, sizes, memory, **options))
    else:
        contenders += find_deepspeed(folder, sizes)
    contenders += [
        Loop(folder, sizes, memory, request * MIB, threads)
        for request, threads in ((1, 1), (4, 1), (16, 1), (1, 4), (4, 4))
    ]
    contenders += find_fio(folder, sizes)
    for contender in contenders:
        if isinstance(contender, Engine):
            info = contender.file.info
            print(f"{contender.name:>16}: {info['backend']}, depth {info['depth']}, "
                  f"pieces of {info['request_bytes'] // 1024} KiB, "
                  f"{'direct' if info['direct'] else 'buffered'}")  # fmt: skip
    try:
        run_rounds(contenders, sizes, chosen.seed)
        figures = {"machine": facts, "file_bytes": sizes.file_bytes, **report(contenders, sizes)}
    finally:
        for contender in contenders:
            contender.close()
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


if __name__ == "__main__":
    main()
