# SPDX-License-Identifier: Apache-2.0
"""A paged training step beside the two things that it cannot be faster than.

These are the same step unpaged, and the step's bytes at the speed of flash. Paged and unpaged run in processes of their
own and take turns, step by step; every loss has to be the same, bit for bit. After each pair of steps, flash alone
moves as many bytes as the paged step did, reads among writes in the same proportion, once through the engine and once
through plain O_DIRECT calls in a few threads: the faster of the two is the bound.

Jobs: the one of `make demo`, and a transformer made on the spot.

    python bench/overlap.py [--folder DIR] [--smoke] [--job NAME] [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _apart import Answer, Contestant, ContestantFailed, serve
from _machine import HugeMemory, machine_facts
from _steps import FULL, SMOKE, Job, contest

MIB = 1 << 20
WANTED = 1.10  # of the larger of the two bounds
JOINED_BYTES = 4 * MIB  # a request of the baseline
LOOP_THREADS = 4
WARM_UP = 3  # steps in which the pager learns


@contextlib.contextmanager
def flash_alone(settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Answer]]:
    """Move bytes as a step did, with nothing beside it."""
    from pagert.engines.flash import open_flash

    file_bytes, page_bytes = settings["file_bytes"], settings["page_bytes"]
    memory = HugeMemory(settings["memory_bytes"])
    engine = open_flash(settings["folder"], capacity_bytes=file_bytes, block_bytes=page_bytes)
    fd = os.open(settings["folder"], os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, file_bytes)
    pool = ThreadPoolExecutor(LOOP_THREADS)
    request_bytes = min(JOINED_BYTES, file_bytes // 4)
    pieces = memory.pieces(request_bytes, file_bytes)
    engine.run([("write", view, offset) for offset, view in pieces])
    for offset, view in pieces:
        os.pwritev(fd, [view], offset)

    def mix(read_bytes: int, written_bytes: int) -> list[tuple[str, memoryview, int]]:
        """Reads among writes, evenly; both walk through the file."""
        counts = {"read": read_bytes / request_bytes, "write": written_bytes / request_bytes}
        done = dict.fromkeys(counts, 0)
        requests = []
        for _ in range(round(sum(counts.values()))):
            kind = max(counts, key=lambda kind: counts[kind] / (done[kind] + 0.5))
            # The two walk half a file apart, so that no block is read and written at the same time.
            offset, view = pieces[
                (done[kind] + (len(pieces) // 2 if kind == "write" else 0)) % len(pieces)
            ]
            done[kind] += 1
            requests.append((kind, view, offset))
        return requests

    def by_engine(requests: list[tuple[str, memoryview, int]]) -> None:
        for start in range(0, len(requests), len(pieces) // 2):  # nothing twice in one batch
            results = engine.run(requests[start : start + len(pieces) // 2])
            assert all(result == 0 for result, _ in results)

    def by_loop(requests: list[tuple[str, memoryview, int]]) -> None:
        def walk(share: list[tuple[str, memoryview, int]]) -> None:
            for kind, view, offset in share:
                call = os.preadv if kind == "read" else os.pwritev
                assert call(fd, [view], offset) == len(view)

        list(pool.map(walk, [requests[k::LOOP_THREADS] for k in range(LOOP_THREADS)]))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        requests = mix(question["read_bytes"], question["written_bytes"])
        moved = sum(len(view) for _, view, _ in requests)
        wanted = question["read_bytes"] + question["written_bytes"]
        found = {}
        for name, move in (("engine", by_engine), ("loop", by_loop)):
            begin = time.perf_counter()
            move(requests)
            found[name] = (time.perf_counter() - begin) * wanted / max(1, moved)
        return found

    info = engine.info
    yield {"backend": info["backend"], "direct": info["direct"], "request_bytes": request_bytes,
           "loop_threads": LOOP_THREADS}, answer  # fmt: skip
    pool.shutdown()
    engine.close()
    os.close(fd)


def measure(job: Job, settings: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Run one job; its figures."""
    order = random.Random(seed)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:

        def join(name: str, **more: Any) -> Contestant:
            contestant = Contestant(__file__, name, {**settings, "job": asdict(job), **more})
            stack.callback(contestant.close)
            return contestant

        runs = {"paged": join("contest", paged=True), "unpaged": join("contest", paged=False)}
        file_bytes = min(1024 * MIB, job.flash_bytes // 2)
        page_bytes = runs["paged"].ready["page_bytes"]
        flash = join(
            "flash", file_bytes=file_bytes, memory_bytes=file_bytes // 4, page_bytes=page_bytes
        )
        ready = runs["paged"].ready
        print(
            f"\n{job.name}: {ready['state_bytes'] / 1e9:.2f} GB of training state, device budget "
            f"{job.device_bytes / MIB:.0f} MiB, pages of {page_bytes >> 10} KiB, batch {job.batch} by {job.seq}, "
            f"policy {settings['policy']}, {ready['threads']} threads, "
            f"OMP_WAIT_POLICY {ready['omp_wait_policy']}; flash alone: {flash.ready}\n"
            f"{'step':>5}{'paged s':>9}{'unpaged':>9}{'flash alone':>13}{'ratio':>7}{'stall s':>9}{'faults':>8}"
            f"{'prefetched':>12}{'read GB':>9}{'written GB':>12}{'moved GB':>10}{'filled GB':>11}  processor s"
        )
        for number in range(WARM_UP + steps):
            found = {name: runs[name].ask() for name in order.sample(list(runs), len(runs))}
            row = found["paged"]
            if row["loss"] != found["unpaged"]["loss"]:
                raise SystemExit(
                    f"step {number}: the losses differ: {row['loss']}, {found['unpaged']['loss']}"
                )
            alone = flash.ask(
                read_bytes=row["flash_read_bytes"], written_bytes=row["flash_written_bytes"]
            )
            row |= {"unpaged_seconds": found["unpaged"]["seconds"], "flash_alone": alone}
            row["unpaged_processor"] = found["unpaged"]["processor"]
            bound = max(row["unpaged_seconds"], min(alone.values()))
            row["ratio"] = row["seconds"] / bound
            threads = ", ".join(
                f"{name} {used:.2f}"
                for name, used in sorted(row["processor"].items())
                if used > 0.005
            )
            mark = "" if number >= WARM_UP else "  (warm-up)"
            print(f"{number:>5}{row['seconds']:>9.3f}{row['unpaged_seconds']:>9.3f}{min(alone.values()):>13.3f}"
                  f"{row['ratio']:>7.2f}{row['stall_seconds']:>9.3f}{row['faults']:>8}{row['prefetches']:>12}"
                  f"{row['flash_read_bytes'] / 1e9:>9.3f}{row['flash_written_bytes'] / 1e9:>12.3f}"
                  f"{row['moved_bytes'] / 1e9:>10.3f}{row['filled_bytes'] / 1e9:>11.3f}  {threads}; unpaged "
                  f"{sum(row['unpaged_processor'].values()):.2f}{mark}", flush=True)  # fmt: skip
            if number >= WARM_UP:
                rows.append(row)
    return {"job": asdict(job), "steps": rows, **summary(job, rows)}


def summary(job: Job, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the medians. The ratio is that of the medians: a slow moment of the machine hits one alone."""
    median = {
        "paged_seconds": statistics.median(row["seconds"] for row in rows),
        "unpaged_seconds": statistics.median(row["unpaged_seconds"] for row in rows),
        "flash_seconds": statistics.median(min(row["flash_alone"].values()) for row in rows),
        "bytes": statistics.median(
            row["flash_read_bytes"] + row["flash_written_bytes"] for row in rows
        ),
    }
    bound = max(median["unpaged_seconds"], median["flash_seconds"])
    ratio = median["paged_seconds"] / bound
    least = min(row["seconds"] for row in rows) / max(
        min(row["unpaged_seconds"] for row in rows),
        min(min(row["flash_alone"].values()) for row in rows),
    )
    print(
        f"{job.name}: a step takes {median['paged_seconds']:.3f} s; unpaged {median['unpaged_seconds']:.3f} s; "
        f"its {median['bytes'] / 1e9:.2f} GB at {median['bytes'] / median['flash_seconds'] / 1e9:.2f} GB/s "
        f"{median['flash_seconds']:.3f} s: {ratio:.2f} of the larger "
        f"(of the fastest steps: {least:.2f}; wanted: {WANTED})"
    )
    return {"median": median, "ratio": ratio, "ratio_of_fastest": least}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and print; the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".", help="where flash lies (default: here)")
    parser.add_argument("--smoke", action="store_true", help="small and quick: does it run at all")
    parser.add_argument("--job", action="append", help="only this one (may be repeated)")
    parser.add_argument("--steps", type=int, help="steps that count")
    parser.add_argument("--policy", default="lookahead", help="of the pager (lookahead)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    machine = machine_facts(chosen.folder)
    for key, value in machine.items():
        print(f"{key:>16}: {value}")
    folder = tempfile.mkdtemp(prefix=".bench-overlap-", dir=chosen.folder)
    figures: dict[str, Any] = {"machine": machine, "policy": chosen.policy, "jobs": {}}
    try:
        settings = {"folder": folder, "policy": chosen.policy}
        steps = chosen.steps or (2 if chosen.smoke else 8)
        for job in SMOKE if chosen.smoke else FULL:
            if chosen.job and job.name not in chosen.job:
                continue
            try:
                figures["jobs"][job.name] = measure(job, settings, steps, chosen.seed)
            except ContestantFailed as error:
                print(f"{job.name}: left out: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


if __name__ == "__main__" and not serve({"contest": contest, "flash": flash_alone}):
    main()
