# SPDX-License-Identifier: Apache-2.0
"""The speed of each link between tiers: the whole pager and the engine alone, beside raw baselines, in one run.

Every contender moves the same bytes, in rounds that are interleaved and shuffled. 'read' is towards the device,
'write' away from it. The pager moves them in two ways:

    whole      one tensor that fills the device tier: prefetch and hold it; change it, then evict() it
    streamed   many tensors, twice the device tier, one after the other: each is held while the next ones are
               prefetched; each is overwritten whole, so that changed ones must leave to make room

What it moved is taken from its own counters, and it must be what was asked for. The device tier is memory here, so a
copy between host and device is a memcpy. With a host tier between flash and device, bytes pass both links at once.

Then the same over page sizes and depths, and the engine alone where no page can be joined with its neighbour
('scattered'): from that the defaults are chosen.

    python bench/tiers.py [--folder DIR] [--smoke] [--json FILE] [--rounds N] [--link NAME]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import pagert
from pagert._core.pump import OVERWRITE

sys.path.insert(0, str(Path(__file__).parent))
from _contenders import (
    KINDS,
    MIB,
    Contender,
    CopyingLoop,
    FlashEngine,
    HostEngine,
    Loop,
    MemoryCopy,
    Sizes,
    compare,
    find_fio,
    plain_loops,
    print_table,
    run_rounds,
)
from _machine import HugeMemory, machine_facts

WANTED = 0.95
FULL = Sizes(file_bytes=1024 * MIB, memory_bytes=256 * MIB, rounds=9)
FULL_HOST = Sizes(file_bytes=256 * MIB, memory_bytes=256 * MIB, rounds=25)
SWEPT = Sizes(file_bytes=256 * MIB, memory_bytes=256 * MIB, rounds=5)
SMOKE = Sizes(file_bytes=16 * MIB, memory_bytes=16 * MIB, rounds=1)
PAGE_KIB = (64, 128, 256, 512, 1024, 4096)
DEPTHS = (8, 32, 64, 128)
PARTS = 16  # tensors that are streamed
AHEAD = PARTS // 2 - 1  # of them, prefetched while one is held: as many as fit beside it

# Places in the core's counters.
H2D, F2D, F2H, D2H, D2F, H2F = range(2, 8)


class Paged(Contender):
    """The pager, in a configuration of tiers. `links` are the counters that say what was moved.

    LRU: each pass finds nothing of what the one before left, and moves all bytes.
    """

    links: dict[str, int]

    def __init__(self, name: str, sizes: Sizes, links: dict[str, int], **budgets: Any):
        super().__init__(name, baseline=False)
        self.sizes, self.links = sizes, links
        self.pager = pagert.Pager(device="cpu", policy="lru", **budgets)

    def fill(self, size_bytes: int, count: int) -> list[torch.Tensor]:
        """Make tensors that hold something, together of size_bytes."""
        words = size_bytes // count // 4
        return [self.pager.full((words,), float(k)) for k in range(count)]

    def moved_bytes(self, link: int) -> int:
        """Return what passed a link so far."""
        return self.pager.pump.state()["counters"]["transferred"][link] * self.pager.page_bytes

    def seconds(self, kind: str) -> float:
        """Move all bytes once, and see that they were moved."""
        before = self.moved_bytes(self.links[kind])
        taken = super().seconds(kind)
        moved = self.moved_bytes(self.links[kind]) - before
        assert moved == self.sizes.file_bytes, f"{self.name}, {kind}: {moved} bytes"
        return taken

    def transfer_bytes(self, kind: str) -> float:
        """Mean size of a transfer on the link."""
        counters = self.pager.pump.state()["counters"]
        count = counters["transfers"][self.links[kind]]
        return self.moved_bytes(self.links[kind]) / count if count else 0.0

    def close(self) -> None:
        """Close the pager."""
        self.pager.close()


class Whole(Paged):
    """One tensor that fills the device tier."""

    def __init__(self, sizes: Sizes, links: dict[str, int], name: str = "whole", **budgets: Any):
        super().__init__(f"pager, {name}", sizes, links, device_bytes=sizes.file_bytes, **budgets)
        (self.tensor,) = self.fill(sizes.file_bytes, 1)

    def prepare(self, kind: str) -> None:
        """Put it where it comes from."""
        if kind == "write":
            self.tensor.add_(1.0)
        else:
            self.tensor.evict()

    def move(self, kind: str) -> None:
        """Bring it to the device, or away."""
        if kind == "write":
            self.tensor.evict()
            return
        self.tensor.prefetch()
        with self.tensor.resident("read"):
            pass


class Streamed(Paged):
    """Many tensors, one after the other, through a device tier that holds half of them."""

    def __init__(self, sizes: Sizes, links: dict[str, int], name: str = "streamed", **budgets: Any):
        device_bytes = sizes.file_bytes // 2
        super().__init__(f"pager, {name}", sizes, links, device_bytes=device_bytes, **budgets)
        self.kept = self.fill(sizes.file_bytes, PARTS)
        self.changed = self.fill(sizes.file_bytes, PARTS)

    def prepare(self, kind: str) -> None:
        """Leave nothing on the device that is not of this kind."""
        for tensor in self.changed if kind == "read" else self.kept:
            tensor.evict()
        if kind == "write":
            self.overwrite()
        else:
            self.read()  # LRU: the next pass finds none of what this one left

    def read(self) -> None:
        """Hold each in turn."""
        for k, tensor in enumerate(self.kept):
            for coming in self.kept[k : k + 1 + AHEAD]:
                coming.prefetch()
            with tensor.resident("read"):
                pass

    def overwrite(self) -> None:
        """Take each as an operator does that writes all of it, without the time for writing."""
        for tensor in self.changed:
            self.pager.pump.pin([(tensor._region, 0, tensor.nbytes, OVERWRITE)]).release()

    def move(self, kind: str) -> None:
        """Stream them."""
        if kind == "read":
            self.read()
        else:
            self.overwrite()


def flash_budgets(folder: str, size_bytes: int, **options: Any) -> dict[str, Any]:
    """Return a flash tier for a pager."""
    return {"flash_path": folder, "flash_bytes": size_bytes, **options}


def host_link(folder: str, sizes: Sizes, memory: HugeMemory) -> list[Contender]:
    """Between host and device."""
    near, far = memory, HugeMemory(sizes.file_bytes)
    links = {"read": H2D, "write": D2H}
    return [
        MemoryCopy(sizes, near, far, 1),
        MemoryCopy(sizes, near, far, 2),
        HostEngine("engine", sizes, near, far),
        Whole(sizes, links, host_bytes=sizes.file_bytes),
        Streamed(sizes, links, host_bytes=2 * sizes.file_bytes),
    ]


def flash_link(folder: str, sizes: Sizes, memory: HugeMemory) -> list[Contender]:
    """Between flash and device."""
    links = {"read": F2D, "write": D2F}
    whole = Whole(sizes, links, **flash_budgets(folder, sizes.file_bytes))
    return [
        *plain_loops(folder, sizes, memory),
        *find_fio(folder, sizes),
        FlashEngine("engine", folder, sizes, memory, whole.pager.page_bytes),
        whole,
        Streamed(sizes, links, **flash_budgets(folder, 2 * sizes.file_bytes)),
    ]


def flash_and_host_links(folder: str, sizes: Sizes, memory: HugeMemory) -> list[Contender]:
    """Between flash and host, and on to the device at once."""
    links = {"read": F2H, "write": H2F}
    return [
        *plain_loops(folder, sizes, memory),
        CopyingLoop(folder, sizes, memory, 4 * MIB, 4),
        Streamed(
            sizes, links, "streamed through host",
            **flash_budgets(folder, 2 * sizes.file_bytes, host_bytes=sizes.file_bytes // 4),
        ),
    ]  # fmt: skip


LINKS = {
    "host-device": host_link,
    "flash-device": flash_link,
    "flash-host": flash_and_host_links,
}


def measure(contenders: list[Contender], sizes: Sizes, seed: int) -> dict[str, Any]:
    """Run the rounds and close everything; the figures of both directions."""
    try:
        run_rounds(contenders, sizes, seed)
        return {
            kind: {
                **compare(contenders, kind),
                "transfer_bytes": {c.name: c.transfer_bytes(kind) for c in contenders if isinstance(c, Paged)},
            }
            for kind in reversed(KINDS)
        }  # fmt: skip
    finally:
        for contender in contenders:
            contender.close()


def print_parts(
    title: str, columns: Sequence[Any], rows: dict[Any, list[dict[str, float]]]
) -> None:
    """Print parts of the best baseline: one line a row, one column for each of `columns`."""
    print(f"\n{title}\n{'':>10}" + "".join(f"{column:>16}" for column in columns))
    for row, cells in rows.items():
        values = (f"{cell['median']:.2f} ({cell['ratio']:.2f})" for cell in cells)
        print(f"{row:>10}" + "".join(f"{value:>16}" for value in values))


def sweep(
    folder: str, sizes: Sizes, seed: int, pages_kib: Sequence[int], depths: Sequence[int]
) -> dict[str, Any]:
    """Page sizes by depths on the flash link, and page sizes on the host link; GB/s (of the best baseline)."""
    found: dict[str, Any] = {}
    memory = HugeMemory(sizes.memory_bytes)
    for page_kib in pages_kib:
        page_bytes = page_kib << 10
        for depth in depths:
            links = {"read": F2D, "write": D2F}
            options = {"page_bytes": page_bytes, "flash_depth": depth}
            contenders = [
                *(Loop(folder, sizes, memory, request * MIB, threads) for request, threads in ((16, 1), (4, 4))),
                FlashEngine("engine", folder, sizes, memory, page_bytes, depth=depth),
                FlashEngine("engine, scattered", folder, sizes, memory, page_bytes, scattered=True, depth=depth),
                Whole(sizes, links, **flash_budgets(folder, sizes.file_bytes, **options)),
                Streamed(sizes, links, **flash_budgets(folder, 2 * sizes.file_bytes, **options)),
            ]  # fmt: skip
            found[f"flash-device, {page_kib} KiB, depth {depth}"] = measure(contenders, sizes, seed)
        far = HugeMemory(sizes.file_bytes)
        links = {"read": H2D, "write": D2H}
        contenders = [
            MemoryCopy(sizes, memory, far, 1),
            MemoryCopy(sizes, memory, far, 2),
            Whole(sizes, links, host_bytes=sizes.file_bytes, page_bytes=page_bytes),
            Streamed(sizes, links, host_bytes=2 * sizes.file_bytes, page_bytes=page_bytes),
        ]
        found[f"host-device, {page_kib} KiB"] = measure(contenders, sizes, seed)
    for kind in reversed(KINDS):
        for name in ("engine, scattered", "engine", "pager, whole", "pager, streamed"):
            rows = {f"{page} KiB": [found[f"flash-device, {page} KiB, depth {depth}"][kind]["contenders"][name]
                                    for depth in depths] for page in pages_kib}  # fmt: skip
            print_parts(f"flash and device, {kind}, {name}, by page size and depth", depths, rows)
    columns = [f"{kind}, {name}" for kind in reversed(KINDS) for name in ("whole", "streamed")]
    rows = {f"{page} KiB": [found[f"host-device, {page} KiB"][kind]["contenders"][f"pager, {name}"]
                            for kind in reversed(KINDS) for name in ("whole", "streamed")]
            for page in pages_kib}  # fmt: skip
    print_parts("host and device, by page size", columns, rows)
    return found


def conclude(figures: dict[str, Any]) -> None:
    """Say how far the whole pager comes on flash."""
    print()
    for kind, found in figures.items():
        for name, row in found["contenders"].items():
            if name.startswith("pager"):
                print(f"{kind}: '{name}' reaches {row['ratio']:.2f} of '{found['best_baseline']}' (wanted: {WANTED}), "
                      f"{found['transfer_bytes'][name] / MIB:.2f} MiB a transfer")  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and print; the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".", help="where the files lie (default: here)")
    parser.add_argument("--smoke", action="store_true", help="small and quick: does it run at all")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    parser.add_argument("--link", choices=(*LINKS, "sweep"), help="only this")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    flash_sizes, host_sizes, swept = (
        (SMOKE, SMOKE, SMOKE) if chosen.smoke else (FULL, FULL_HOST, SWEPT)
    )
    for each in (flash_sizes, host_sizes, swept):
        each.rounds = chosen.rounds or each.rounds
    torch.set_num_threads(
        1
    )  # or its threads spin for a while after an operator, and take the cores
    facts = machine_facts(chosen.folder)
    for key, value in facts.items():
        print(f"{key:>16}: {value}")

    figures: dict[str, Any] = {"machine": facts}
    memory = HugeMemory(flash_sizes.memory_bytes)
    for name, contenders in LINKS.items():
        if chosen.link not in (None, name):
            continue
        sizes = host_sizes if name == "host-device" else flash_sizes
        figures[name] = measure(contenders(chosen.folder, sizes, memory), sizes, chosen.seed)
        print(f"\n{name}: {sizes.file_bytes // MIB} MiB in each pass, {sizes.rounds} rounds")
        for kind, found in figures[name].items():
            print_table(f"{name}, {kind}", found)
        conclude(figures[name])
    if chosen.link in (None, "sweep"):
        pages, depths = ((64, 1024), (8,)) if chosen.smoke else (PAGE_KIB, DEPTHS)
        figures["sweep"] = sweep(chosen.folder, swept, chosen.seed, pages, depths)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


if __name__ == "__main__":
    main()
