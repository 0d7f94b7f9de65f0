# SPDX-License-Identifier: Apache-2.0
"""Policies beside the offline optimum, on recorded training traces.

Each job is trained for a few steps under a pager that records; traces are kept in a folder, and recorded again
when it is removed. Every policy then runs on each trace with the budget of the recording and with larger ones. A
step's bytes are those of steady state: the first four steps, in which lookahead learns, and the last are left out.
Lookahead runs without and with prefetch; it may move more with it, and fewer operators wait. 'written' is the optimum
for policies that may not throw away dirty pages, as none that runs may; 'min' throws those away that are overwritten
or released next.

libCacheSim, where installed, counts the misses of LRU and of Belady's algorithm independently on the page uses of each
trace, one page at a time.

    python bench/policy.py [--smoke] [--folder DIR] [--json FILE] [--job NAME]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pagert
from pagert.simulation import Simulation, available_policies, simulate
from pagert.trace import Operator

sys.path.insert(0, str(Path(__file__).parent))
from _training import Job, full_jobs, smoke_jobs

WANTED = 1.05  # lookahead's bytes, of the optimum's
BUDGETS = (1.0, 1.5, 2.0)  # of the budget that the trace was recorded with
UNIT_USES = 40_000  # of each trace, for libCacheSim's interface of one call a use
MB = 1e6


def open_trace(job: Job, folder: Path, steps: int) -> pagert.Trace | None:
    """Load a job's trace; record it where there is none. None where the job cannot run here."""
    path = folder / f"{job.name}-{job.device_bytes >> 20}MiB-{steps}.trace"
    if path.exists():
        try:
            return pagert.Trace.load(path)
        except pagert.TraceError as error:
            print(f"{error}; recording it again")
    begin = time.perf_counter()
    try:
        trace = job.record(job, steps)
    except (ImportError, pagert.PagertError) as error:
        print(f"{job.name}: left out: {error}")
        return None
    trace.save(path)
    print(f"{job.name}: recorded in {time.perf_counter() - begin:.0f} s, {path.stat().st_size >> 10} KiB")
    return trace


def per_step(found: Simulation) -> dict[str, float]:
    """What a policy did in one step of steady state."""
    steps = found.steady_steps
    mean = {
        name: sum(getattr(step, name) for step in steps) / len(steps)
        for name in ("faults", "prefetched_pages", "fetched_pages", "written_pages")
    }
    return {
        "misses": mean["faults"] + mean["prefetched_pages"],
        "waited_for": mean["faults"],
        "fetched_bytes": mean["fetched_pages"] * found.page_bytes,
        "written_bytes": mean["written_pages"] * found.page_bytes,
    }


def contenders() -> list[tuple[str, dict[str, Any]]]:
    """Names, and the options of `simulate`. The last is what the others are held against."""
    found: list[tuple[str, dict[str, Any]]] = [("lru", {"policy": "lru"})]
    if "lookahead" in available_policies():
        found += [
            ("lookahead", {"policy": "lookahead"}),
            ("prefetch", {"policy": "lookahead", "prefetch": True}),
        ]
    return [*found, ("written", {"policy": "min", "discard": False}), ("min", {"policy": "min"})]


def compare(job: Job, trace: pagert.Trace) -> list[dict[str, Any]]:
    """Run every policy with every budget, and print them beside the optimum."""
    print(f"\n{job.name}: {trace}")
    print(f"{'budget':>10}  {'policy':<10}{'misses':>9}{'waited':>9}{'fetched MB':>12}{'written MB':>12}{'of min':>8}"
          f"{'seconds':>9}")  # fmt: skip
    results = []
    for factor in BUDGETS:
        pages = max(int(job.device_bytes * factor) // trace.page_bytes, trace.largest_operator[1])
        rows: dict[str, Any] = {}
        for name, options in contenders():
            begin = time.perf_counter()
            found = simulate(trace, capacity_pages=pages, **options)
            rows[name] = {
                **per_step(found),
                "seconds": time.perf_counter() - begin,
                "whole_trace_bytes": found.moved_pages * found.page_bytes,
            }
        least = rows["min"]["fetched_bytes"] + rows["min"]["written_bytes"]
        for number, (policy, row) in enumerate(rows.items()):
            moved = row["fetched_bytes"] + row["written_bytes"]
            row["of_min"] = moved / least if least else 1.0 if not moved else float("inf")
            place = f"{pages * trace.page_bytes / 2**20:.0f} MiB" if number == 0 else ""
            print(
                f"{place:>10}  {policy:<10}{row['misses']:9.0f}{row['waited_for']:9.0f}"
                f"{row['fetched_bytes'] / MB:12.1f}{row['written_bytes'] / MB:12.1f}"
                f"{row['of_min']:8.3f}{row['seconds']:9.2f}"
            )
        results.append({"budget_bytes": pages * trace.page_bytes, "policies": rows})
    return results


def unit_uses(trace: pagert.Trace) -> list[int]:
    """The pages that a trace uses, one after the other, each region's pages apart."""
    pages = []
    for event in trace:
        if type(event) is Operator:
            for region, first, count, _ in event.accesses:
                pages += [(region << 20) + page for page in range(first, first + count)]
                if len(pages) >= UNIT_USES:
                    return pages[:UNIT_USES]
    return pages


def misses_of_libcachesim(policy: Any, request: Any, pages: list[int], capacity: int) -> int:
    """Drive one of libCacheSim's caches through the uses, telling it each page's next one."""
    coming: list[int] = [1 << 62] * len(pages)
    following: dict[int, int] = {}
    for position in range(len(pages) - 1, -1, -1):
        coming[position] = following.get(pages[position], 1 << 62)
        following[pages[position]] = position
    cache = policy(cache_size=capacity, hashpower=16)
    return sum(
        not cache.get(
            request(obj_id=page, obj_size=1, clock_time=k + 1, next_access_vtime=coming[k])
        )
        for k, page in enumerate(pages)
    )


def check_counts(name: str, trace: pagert.Trace) -> list[dict[str, Any]]:
    """Compare misses on unit pages with libCacheSim's; raises where they differ."""
    try:
        import libcachesim
    except ImportError:
        print("libCacheSim is not installed: no independent counts")
        return []
    pages = unit_uses(trace)
    different = len(set(pages))
    checked = []
    for capacity in sorted({max(1, different // part) for part in (10, 4, 2)}):
        ours = [
            simulate([(page, "r") for page in pages], capacity_pages=capacity, policy=p).faults
            for p in ("lru", "min")
        ]
        theirs = [
            misses_of_libcachesim(policy, libcachesim.Request, pages, capacity)
            for policy in (libcachesim.LRU, libcachesim.Belady)
        ]
        print(f"{name}, {len(pages)} uses of {different} pages, {capacity} frames: misses of lru {ours[0]}, "
              f"of min {ours[1]}; libCacheSim: {theirs[0]}, {theirs[1]}")  # fmt: skip
        if ours != theirs:
            raise SystemExit("the counts differ")
        checked.append({"capacity": capacity, "lru": ours[0], "min": ours[1]})
    return checked


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Record, simulate and print; the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and quick: does it run at all")
    parser.add_argument("--folder", type=Path, help="where traces are kept (.cache/traces)")
    parser.add_argument("--job", action="append", help="only this one (may be repeated)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps to record (8)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder or Path(".cache") / ("traces-smoke" if chosen.smoke else "traces")
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"policies": available_policies(), "jobs": {}}
    worst = 0.0
    for job in smoke_jobs() if chosen.smoke else full_jobs():
        if chosen.job and job.name not in chosen.job:
            continue
        trace = open_trace(job, folder, chosen.steps)
        if trace is None:
            continue
        results = compare(job, trace)
        figures["jobs"][job.name] = {"results": results, "counts": check_counts(job.name, trace)}
        for result in results:
            for name in ("lookahead", "prefetch"):
                if name in result["policies"]:
                    worst = max(worst, result["policies"][name]["of_min"])
    if worst:
        print(f"\nlookahead moves at most {worst:.3f} of the optimum's bytes (wanted: {WANTED})")
    else:
        print("\nthe core has no lookahead policy: lru and min alone")
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


if __name__ == "__main__":
    main()
