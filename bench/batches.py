# SPDX-License-Identifier: Apache-2.0
"""The demo's job over batch sizes: time, memory and bytes of a step, paged beside unpaged, each from one run.

Each row is one `pagert finetune --compare`: the job in pages, and then the same steps without them in a process of its
own. 'flash alone' is the time that the step's bytes take at the best rates that this run's bandwidth probe saw, read
and written one after the other; 'ratio' is the step's time by the larger of that and the unpaged step.

    python bench/batches.py [--smoke] [--batches 1,2,4,8] [--seq N] [--device-bytes S] [--steps N] [--json FILE]
        [--more OPTION ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _machine import machine_facts

MIB = 1 << 20


def smoke_model(folder: Path) -> Path:
    """Write a tiny Llama with a tokenizer of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {chr(code): code for code in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained(folder)
    return folder


def run(options: argparse.Namespace, batch: int, folder: Path) -> dict[str, Any]:
    """Run one job paged and unpaged. Raises where it fails."""
    report = folder / f"{batch}.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "pagert", "finetune", f"--model={options.model}", f"--text={options.text}",
            f"--device-bytes={options.device_bytes}", f"--flash-path={folder}", f"--flash-bytes={options.flash_bytes}",
            f"--steps={options.steps}", f"--batch={batch}", f"--seq={options.seq}", "--lr=2e-5", "--eval-batches=2",
            "--compare", "--plain", f"--json={report}", *options.more,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    if not report.is_file():
        raise RuntimeError(f"batch {batch}: exit status {done.returncode}\n{done.stdout}")
    return json.loads(report.read_text())


def bandwidth(folder: Path, size_bytes: int) -> tuple[float, float]:
    """Return the best bytes a second, read and written, of tensors that pass through a small device tier."""
    import time

    import torch

    import pagert

    best = [0.0, 0.0]
    with pagert.Pager(
        device="cpu", device_bytes=size_bytes, flash_path=folder, flash_bytes=4 * size_bytes
    ) as pager:
        tensor = pager.tensor(torch.ones(size_bytes // 8))
        for _ in range(5):
            tensor.add_(1)
            begin = time.perf_counter()
            tensor.evict()
            written = time.perf_counter()
            with tensor.resident("read"):
                read = time.perf_counter()
            best[0] = max(best[0], tensor.nbytes / (read - written))
            best[1] = max(best[1], tensor.nbytes / (written - begin))
    return best[0], best[1]


def show(batch: int, report: dict[str, Any], rates: tuple[float, float]) -> dict[str, Any]:
    """Print a row and return its figures."""
    unpaged = report["comparison"]["unpaged"]
    steps = len(report["steps"])
    moved = {name: report["moved_in_steps"][f"flash_{name}_bytes"] / steps for name in ("read", "written")}
    alone = moved["read"] / rates[0] + moved["written"] / rates[1]
    bound = max(unpaged["median_step_seconds"], alone)
    row = {
        "batch": batch,
        "paged_seconds": report["median_step_seconds"],
        "unpaged_seconds": unpaged["median_step_seconds"],
        "flash_alone_seconds": alone,
        "ratio": report["median_step_seconds"] / bound,
        "paged_rss_bytes": report["peak_rss_bytes"],
        "unpaged_rss_bytes": unpaged["peak_rss_bytes"],
        "read_bytes": moved["read"],
        "written_bytes": moved["written"],
        "stall_seconds": report["moved_in_steps"]["stall_seconds"] / steps,
        "bitwise_equal": report["comparison"]["bitwise_equal"],
    }
    print(
        f"{batch:>5}{row['paged_seconds']:>9.2f}{row['unpaged_seconds']:>9.2f}{alone:>9.2f}{row['ratio']:>8.2f}"
        f"{row['stall_seconds']:>8.2f}{row['paged_rss_bytes'] / MIB:>9.0f}{row['unpaged_rss_bytes'] / MIB:>9.0f}"
        f"{moved['read'] / 1e9:>8.2f}{moved['written'] / 1e9:>8.2f}  {'yes' if row['bitwise_equal'] else 'NO'}",
        flush=True,
    )
    return row


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, for the suite")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--device-bytes", default="512MiB")
    parser.add_argument("--flash-bytes", default="6GiB")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="kjv")
    parser.add_argument("--folder", default=".", help="for the flash tier")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="further options of finetune")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="pagert-batches-", dir=options.folder) as name:
        folder = Path(name)
        if options.smoke:
            model = folder / "model"
            model.mkdir()
            options.model, options.text = smoke_model(model), Path(__file__)
            options.batches, options.seq, options.steps = "1", 16, 2
            options.device_bytes, options.flash_bytes = "8MiB", "64MiB"
        facts = machine_facts(name)
        for key, value in facts.items():
            print(f"{key:>16}: {value}")
        rates = bandwidth(folder, (8 if options.smoke else 512) * MIB)
        print(f"\nflash: {rates[0] / 1e9:.2f} GB/s read, {rates[1] / 1e9:.2f} GB/s written, of one tensor")
        print(f"{'batch':>5}{'paged s':>9}{'unpaged':>9}{'flash':>9}{'ratio':>8}{'stall':>8}"
              f"{'RSS MiB':>9}{'unpaged':>9}{'GB in':>8}{'out':>8}  bitwise")  # fmt: skip
        rows = [
            show(batch, run(options, batch, folder), rates)
            for batch in map(int, options.batches.split(","))
        ]
    figures = {"machine": facts, "read_rate": rates[0], "write_rate": rates[1], "rows": rows}
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))
    return figures


if __name__ == "__main__":
    main()
