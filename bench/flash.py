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
import sys
import time
from pathlib import Path
from typing import Any

from pagert._core.flash import crc32c, crc32c_is_hardware

sys.path.insert(0, str(Path(__file__).parent))
from _contenders import (
    MIB,
    Contender,
    FlashEngine,
    Sizes,
    compare,
    find_fio,
    plain_loops,
    print_table,
    run_rounds,
)
from _machine import HugeMemory, machine_facts

PAGE_BYTES = 256 << 10

FULL = Sizes(file_bytes=1024 * MIB, memory_bytes=256 * MIB, rounds=7)
SMOKE = Sizes(file_bytes=64 * MIB, memory_bytes=32 * MIB, rounds=2)


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


def find_deepspeed(folder: str, sizes: Sizes) -> list[Contender]:
    """Return DeepSpeed's handle where it can be imported and built."""
    try:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return [AioHandle(folder, sizes, AsyncIOBuilder().load().aio_handle, torch)]
    except Exception as error:
        print(f"DeepSpeed aio_handle: not usable ({type(error).__name__})")
        return []


def report(contenders: list[Contender], sizes: Sizes) -> dict[str, Any]:
    """Print the tables; the figures as a dict."""
    figures = {kind: compare(contenders, kind) for kind in ("read", "write")}
    for kind, found in figures.items():
        print_table(f"{kind}, {sizes.file_bytes // MIB} MiB", found)
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
        FlashEngine("engine, defaults", folder, sizes, memory, PAGE_BYTES),
        FlashEngine("engine, threads", folder, sizes, memory, PAGE_BYTES, backend="threads"),
    ]
    if chosen.sweep:
        for depth in (8, 16, 32, 64):
            for request in (MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB):
                name = f"engine, {depth} x {request / MIB:g} MiB"
                options = {"depth": depth, "request_bytes": request, "backend": "io_uring"}
                contenders.append(FlashEngine(name, folder, sizes, memory, PAGE_BYTES, **options))
    else:
        contenders += find_deepspeed(folder, sizes)
    contenders += plain_loops(folder, sizes, memory)
    contenders += find_fio(folder, sizes)
    for contender in contenders:
        if isinstance(contender, FlashEngine):
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
