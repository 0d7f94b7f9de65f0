# SPDX-License-Identifier: Apache-2.0
"""Forward passes over weights three times the memory for them, beside other ways to do that.

A Llama with random fp32 weights reads 64 tokens, again and again, in a few processes that take turns:

    resident        everything in memory, without a limit
    paged           pages in a device budget, flash below, policy lookahead
    mapped          the weights' file mapped into memory; the OS reads it as it is touched
    disk_offload    `accelerate.disk_offload`

All but the first live in memory cgroups of the same size, which count what a process holds and what the OS keeps of
its files. Where no cgroup can be made, the row says so, and the OS is told before each pass to forget the files. All
logits have to be the same, bit for bit.

    python bench/forward.py [--folder DIR] [--smoke] [--passes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _apart import (
    Answer,
    Contestant,
    ContestantFailed,
    drop_cached,
    limit_memory,
    serve,
    storage_bytes,
    thread_seconds,
)
from _machine import machine_facts, spread

MIB = 1 << 20
READS_WANTED = 1.10  # of the weights that do not fit the budget
FASTER_WANTED = {"mapped": 1.8, "disk_offload": 2.5}
WARM_UP = 3  # passes in which the pager learns, and everybody's caches fill


@dataclass(frozen=True)
class Sizes:
    """The model and its budgets."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    tokens: int
    budget_bytes: int
    limit_bytes: int  # of a process: the budget, the interpreter with its libraries, activations
    page_bytes: int | None
    passes: int


FULL = Sizes(
    width=1536, inner=4096, layers=24, heads=12, vocabulary=32000, tokens=64, budget_bytes=1000 * 1000 * 1000,
    limit_bytes=1536 * MIB, page_bytes=None, passes=7,
)  # fmt: skip
SMOKE = Sizes(
    width=128, inner=256, layers=8, heads=2, vocabulary=512, tokens=16, budget_bytes=2 * MIB,
    limit_bytes=1024 * MIB, page_bytes=16 << 10, passes=2,
)  # fmt: skip


def build(sizes: dict[str, Any]) -> Any:
    """Make the model without weights."""
    from transformers import LlamaConfig

    from pagert.finetune.model import build_empty

    config = LlamaConfig(
        hidden_size=sizes["width"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"],
        vocab_size=sizes["vocabulary"],
        tie_word_embeddings=False,
    )
    return build_empty(config).eval()


@contextlib.contextmanager
def write_weights(settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Answer]]:
    """Give the model random weights, and write them as a Hugging Face folder."""
    import torch

    torch.manual_seed(0)
    model = build(settings["sizes"]).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(0, 0.02)
    model.save_pretrained(settings["weights"], max_shard_size="100GB")
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    yield {"weights_bytes": weights_bytes}, lambda question: {}


class Mapped:
    """A `ModelSource` whose tensors lie in the mapped file."""

    def __init__(self, path: Path) -> None:
        from safetensors.torch import load_file

        self.path = path
        self._tensors = load_file(path / "model.safetensors")

    def tensors(self, names: Collection[str], base_prefix: str) -> Iterator[tuple[str, Any]]:
        """Yield them as they are."""
        for name in names:
            yield name, self._tensors[name]


def answer_with(model: Any, settings: dict[str, Any], pager: Any = None) -> Answer:
    """Return what runs one pass, with what it took and moved."""
    import torch

    torch.manual_seed(1)
    sizes = settings["sizes"]
    tokens = torch.randint(sizes["vocabulary"], (1, sizes["tokens"]))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        for path in question.get("forget", ()):
            drop_cached(Path(path))
        if pager is not None:
            pager.reset_stats()
        threads, read = thread_seconds(), storage_bytes()[0]
        begin = time.perf_counter()
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
        seconds = time.perf_counter() - begin
        found = {
            "seconds": seconds,
            "read_bytes": storage_bytes()[0] - read,
            "processor": {
                name: used - threads.get(name, 0.0) for name, used in thread_seconds().items()
            },
            "digest": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        }
        if pager is not None:
            stats = pager.stats()
            names = ("flash_read_bytes", "flash_written_bytes", "stall_seconds", "faults", "prefetches",
                     "moved_bytes", "filled_bytes", "evictions")  # fmt: skip
            found |= {name: getattr(stats, name) for name in names}
        return found

    return answer


def facts(**more: Any) -> dict[str, Any]:
    """What a contestant says of itself when it is ready."""
    import torch

    wait = os.environ.get("OMP_WAIT_POLICY", "default")
    return {"threads": torch.get_num_threads(), "omp_wait_policy": wait, **more}


@contextlib.contextmanager
def resident(settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Answer]]:
    """Everything in memory."""
    import torch

    from pagert.finetune.model import fill
    from pagert.finetune.source import open_source

    model = build(settings["sizes"])
    fill(model, open_source(settings["weights"]), torch.device("cpu"), None)
    drop_cached(Path(settings["weights"]) / "model.safetensors")
    yield facts(), answer_with(model, settings)


@contextlib.contextmanager
def paged(settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Answer]]:
    """Pages in the device budget, flash below."""
    import pagert
    from pagert.finetune.memory import keep_heap_small
    from pagert.finetune.model import fill
    from pagert.finetune.source import open_source

    sizes = settings["sizes"]
    keep_heap_small()
    model = build(sizes)
    flash_bytes = settings["weights_bytes"] * 5 // 4 + 64 * MIB
    options = {
        "device": "cpu",
        "device_bytes": sizes["budget_bytes"],
        "flash_path": settings["folder"],
        "flash_bytes": flash_bytes,
        "page_bytes": sizes["page_bytes"],
        "policy": settings["policy"],
    }
    with pagert.Pager(**options) as pager:
        fill(model, open_source(settings["weights"]), pager.device, pager)
        pager.page_(model)
        pager.flush()
        drop_cached(Path(settings["weights"]) / "model.safetensors")
        stats = pager.stats()
        kept = {"page_bytes": pager.page_bytes, "flash_backend": stats.flash_backend,
                "flash_direct": stats.flash_direct, "device_bytes": stats.device.capacity_bytes,
                "policy": settings["policy"]}  # fmt: skip
        yield facts(**kept), answer_with(model, settings, pager)


@contextlib.contextmanager
def mapped(settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Answer]]:
    """The safetensors file, mapped."""
    import torch

    from pagert.finetune.model import fill

    model = build(settings["sizes"])
    weights = Path(settings["weights"])
    fill(model, Mapped(weights), torch.device("cpu"), None)
    made = facts(
        how="safetensors.torch.load_file, which maps the file",
        files=[str(weights / "model.safetensors")],
    )
    yield made, answer_with(model, settings)


@contextlib.contextmanager
def disk_offload(settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Answer]]:
    """`accelerate.disk_offload`, with every weight in a file of its own."""
    import accelerate
    import torch

    from pagert.finetune.memory import keep_heap_small
    from pagert.finetune.model import fill

    keep_heap_small()  # or holes in the heap, where weights come and go, outgrow the limit
    model = build(settings["sizes"])
    weights = Path(settings["weights"])
    fill(model, Mapped(weights), torch.device("cpu"), None)
    folder = Path(settings["folder"]) / "offload"
    model = accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    files = sorted(str(path) for path in folder.glob("*.dat"))
    for path in (*files, weights / "model.safetensors"):
        drop_cached(Path(path))
    how = "disk_offload(model, offload_dir, execution_device='cpu'), other arguments as they are"
    yield facts(version=accelerate.__version__, how=how, files=files), answer_with(model, settings)


CONTESTANTS = {"resident": resident, "paged": paged, "disk_offload": disk_offload, "mapped": mapped}


def start(settings: dict[str, Any], sizes: Sizes) -> tuple[list[Contestant], dict[str, str]]:
    """Prepare everybody, one after the other; those who cannot take part, and why.

    The one with the mapped file is last: nobody else touches it from then on, so its pages count as its own.
    """
    present: list[Contestant] = []
    absent: dict[str, str] = {}
    for name in CONTESTANTS:
        limit, how = None, "none"
        if name != "resident":
            limit, how = limit_memory(name, sizes.limit_bytes)
            how = f"{sizes.limit_bytes / MIB:.0f} MiB ({how})" if limit else f"none: {how}"
        try:
            contestant = Contestant(__file__, name, settings, limit)
        except ContestantFailed as error:
            absent[name] = str(error)
            if limit is not None:
                limit.close()
            continue
        contestant.ready["memory_limit"] = how
        present.append(contestant)
    return present, absent


def run_rounds(
    contestants: list[Contestant], passes: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Take turns, in another order each round. The warm-up is left out."""
    order = random.Random(seed)
    taken: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in contestants}
    digests = set()
    for round_index in range(WARM_UP + passes):
        for contestant in order.sample(contestants, len(contestants)):
            limited = contestant.limit is not None or contestant.name == "resident"
            found = contestant.ask(forget=[] if limited else contestant.ready.get("files", []))
            digests.add(found["digest"])
            if round_index >= WARM_UP:
                taken[contestant.name].append(found)
    if len(digests) != 1:
        raise SystemExit(f"the logits differ: {len(digests)} different ones")
    return taken


def report(
    contestants: list[Contestant],
    taken: dict[str, list[dict[str, Any]]],
    weights_bytes: int,
    sizes: Sizes,
) -> dict[str, Any]:
    """Print the tables; the figures."""
    rows: dict[str, Any] = {}
    paged_seconds = [one["seconds"] for one in taken.get("paged", [])]
    print(f"\n{'a forward pass':<15}{'seconds: median (min to max)':>31}{'of paged':>10}{'read GB':>9}"
          f"{'processor s':>13}{'peak MiB':>10}  limit")  # fmt: skip
    for contestant in contestants:
        found = taken[contestant.name]
        row: dict[str, Any] = {"seconds": spread([one["seconds"] for one in found])}
        row["read_bytes"] = statistics.median(one["read_bytes"] for one in found)
        row["processor_seconds"] = statistics.median(
            sum(one["processor"].values()) for one in found
        )
        if paged_seconds:
            row["of_paged"] = statistics.median(
                one["seconds"] / paged for one, paged in zip(found, paged_seconds, strict=True)
            )
        row["settings"] = {k: v for k, v in contestant.ready.items() if k != "files"}
        row["peak_bytes"] = contestant.limit.peak_bytes() if contestant.limit else None
        row["passes"] = found
        rows[contestant.name] = row
        seconds = row["seconds"]
        text = f"{seconds['median']:.2f} ({seconds['min']:.2f} to {seconds['max']:.2f})"
        peak = f"{row['peak_bytes'] / MIB:.0f}" if row["peak_bytes"] else "-"
        print(f"{contestant.name:<15}{text:>31}{row.get('of_paged', float('nan')):>10.2f}"
              f"{row['read_bytes'] / 1e9:>9.2f}{row['processor_seconds']:>13.2f}{peak:>10}"
              f"  {contestant.ready['memory_limit']}")  # fmt: skip
    if "paged" in rows:
        show_paged(rows["paged"], taken["paged"], weights_bytes, sizes)
        for name, wanted in FASTER_WANTED.items():
            if name in rows:
                print(
                    f"paged is {rows[name]['of_paged']:.2f} times as fast as {name} (wanted: {wanted})"
                )
    return rows


def show_paged(
    row: dict[str, Any], passes: list[dict[str, Any]], weights_bytes: int, sizes: Sizes
) -> None:
    """Print what was moved in each pass, and how that stands to what had to be."""
    print(f"\n{'paged, a pass':<15}{'seconds':>8}{'stall s':>9}{'faults':>8}{'prefetched':>12}{'read GB':>9}"
          f"{'written GB':>12}{'moved GB':>10}  processor s of threads")  # fmt: skip
    for number, one in enumerate(passes):
        threads = ", ".join(
            f"{name} {used:.2f}" for name, used in sorted(one["processor"].items()) if used >= 0.005
        )
        print(f"{number:<15}{one['seconds']:>8.2f}{one['stall_seconds']:>9.2f}{one['faults']:>8}"
              f"{one['prefetches']:>12}{one['flash_read_bytes'] / 1e9:>9.3f}"
              f"{one['flash_written_bytes'] / 1e9:>12.3f}{one['moved_bytes'] / 1e9:>10.3f}  {threads}")  # fmt: skip
    least = weights_bytes - sizes.budget_bytes
    row["read_of_least"] = [one["flash_read_bytes"] / least for one in passes]
    print(f"\nflash reads are {statistics.median(row['read_of_least']):.3f} of the {least / 1e9:.3f} GB of weights "
          f"that do not fit (at most {max(row['read_of_least']):.3f}; wanted: {READS_WANTED})")  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and print; the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".", help="where weights and flash lie (default: here)")
    parser.add_argument("--smoke", action="store_true", help="small and quick: does it run at all")
    parser.add_argument("--passes", type=int, help="passes that count")
    parser.add_argument("--policy", default="lookahead", help="of the pager (lookahead)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    sizes = SMOKE if chosen.smoke else FULL
    machine = machine_facts(chosen.folder)
    for key, value in machine.items():
        print(f"{key:>16}: {value}")
    folder = tempfile.mkdtemp(prefix=".bench-forward-", dir=chosen.folder)
    contestants: list[Contestant] = []
    try:
        settings = {"sizes": asdict(sizes), "folder": folder, "weights": os.path.join(folder, "weights"),
                    "policy": chosen.policy}  # fmt: skip
        writer = Contestant(__file__, "weights", settings)
        writer.close()
        settings |= writer.ready
        drop_cached(Path(settings["weights"]) / "model.safetensors")
        contestants, absent = start(settings, sizes)
        print(f"{'weights':>16}: {settings['weights_bytes'] / 1e9:.3f} GB fp32, batch 1 by {sizes.tokens} tokens; "
              f"budget {sizes.budget_bytes / 1e9:.3f} GB")  # fmt: skip
        for contestant in contestants:
            kept = {name: value for name, value in contestant.ready.items() if name != "files"}
            print(f"{contestant.name:>16}: " + ", ".join(f"{k}={v}" for k, v in kept.items()))
        for name, reason in absent.items():
            print(f"{name:>16}: takes no part: {reason}")
        taken = run_rounds(contestants, chosen.passes or sizes.passes, chosen.seed)
        rows = report(contestants, taken, settings["weights_bytes"], sizes)
    finally:
        for contestant in contestants:
            contestant.close()
        shutil.rmtree(folder, ignore_errors=True)
    figures = {"machine": machine, "sizes": asdict(sizes), "weights_bytes": settings["weights_bytes"],
               "contestants": rows, "absent": absent}  # fmt: skip
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


if __name__ == "__main__" and not serve({"weights": write_weights, **CONTESTANTS}):
    main()
