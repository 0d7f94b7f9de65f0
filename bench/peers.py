# SPDX-License-Identifier: Apache-2.0
"""A training step with weights, gradients and optimizer state beyond memory: pagert beside DeepSpeed.

DeepSpeed keeps parameters and optimizer state in files on flash (ZeRO-Infinity: stage 3, both offloaded to 'nvme') and
computes on the CPU, in one process; its settings are in the output. The job is a transformer made on the spot. pagert,
DeepSpeed and the plain unpaged step run in processes of their own and take turns. Losses of the paged and the unpaged
run are the same bit for bit; DeepSpeed's own Adam rounds in another way, so its loss is printed beside them.

DeepSpeed compiles what it needs at its first start, which takes minutes, and needs the headers of libaio (Debian and
Ubuntu: libaio-dev). Where it is not installed or does not start, its row says why; at the smoke size it takes part
only where asked to.

    python bench/peers.py [--folder DIR] [--smoke [--deepspeed]] [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _apart import (
    Answer,
    Contestant,
    ContestantFailed,
    forget_peak,
    serve,
    storage_bytes,
    thread_seconds,
)
from _machine import machine_facts, spread
from _steps import FULL, SMOKE, Job, contest, made_batches, made_model

MIB = 1 << 20
WARM_UP = 3


def deepspeed_settings(job: Job, folder: str) -> dict[str, Any]:
    """What DeepSpeed is told: everything that can go to flash goes there, in fp32, with fused buffers of 1/8 budget."""
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme", "nvme_path": folder, "buffer_count": 8,
                "buffer_size": max(1, job.vocabulary * job.width), "max_in_cpu": 0,
            },
            "offload_optimizer": {
                "device": "nvme", "nvme_path": folder, "buffer_count": 12,
                "pipeline_read": True, "pipeline_write": True,
            },
            "stage3_max_live_parameters": job.device_bytes // 16,
            "stage3_max_reuse_distance": job.device_bytes // 16,
            "stage3_prefetch_bucket_size": job.device_bytes // 32,
            "stage3_param_persistence_threshold": 16384,
            "sub_group_size": job.device_bytes // 64,
        },
        "aio": {
            "block_size": MIB, "queue_depth": 32, "thread_count": 2, "single_submit": False,
            "overlap_events": True,
        },
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip


@contextlib.contextmanager
def deepspeed(settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Answer]]:
    """Train with ZeRO-Infinity, one step for each question."""
    # One process that is the whole world; set before DeepSpeed looks.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    world = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29531",
    }
    os.environ.update(world)
    import deepspeed as library
    import torch
    from torch.nn.functional import cross_entropy

    job = Job(**settings["job"])
    options = deepspeed_settings(job, settings["folder"])
    torch.manual_seed(0)
    library.init_distributed(dist_backend="gloo")
    # Without Init, DeepSpeed 0.19 swaps the parameters of every CPU model as bfloat16, whatever was asked for.
    with library.zero.Init(config_dict_or_path=options):
        model = made_model(job)
    next_batch = made_batches(job)
    engine, *_ = library.initialize(
        model=model, model_parameters=model.parameters(), config=options
    )
    engine.train()
    from pagert.finetune.memory import peak_rss_bytes, return_free_memory

    return_free_memory()
    forget_peak()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        threads, storage = thread_seconds(), storage_bytes()
        begin = time.perf_counter()
        inputs, targets = next_batch()
        logits = engine(inputs).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        found: dict[str, Any] = {
            "loss": float(loss.detach()).hex(),
            "seconds": time.perf_counter() - begin,
        }
        found["storage_bytes"] = [b - a for a, b in zip(storage, storage_bytes(), strict=True)]
        found["peak_bytes"] = peak_rss_bytes()
        found["processor"] = {
            name: used - threads.get(name, 0.0) for name, used in thread_seconds().items()
        }
        return found

    yield (
        {"threads": torch.get_num_threads(), "version": library.__version__, "settings": options},
        answer,
    )


def run(
    job: Job, settings: dict[str, Any], steps: int, seed: int, left_out: dict[str, str]
) -> dict[str, Any]:
    """Take turns; the rows of the table."""
    order = random.Random(seed)
    absent = dict(left_out)
    taken: dict[str, list[dict[str, Any]]] = {}
    rows: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        runs: dict[str, Contestant] = {}
        for name, role, more in (
            ("unpaged", "contest", {"paged": False}),
            ("pagert", "contest", {"paged": True}),
            ("deepspeed", "deepspeed", {}),
        ):
            if name in absent:
                continue
            try:
                if role == "deepspeed":
                    importlib.metadata.version("deepspeed")
                runs[name] = Contestant(__file__, role, {**settings, "job": asdict(job), **more})
                stack.callback(runs[name].close)
            except importlib.metadata.PackageNotFoundError:
                absent[name] = "not installed (pip install 'pagert[peers]')"
            except ContestantFailed as error:
                absent[name] = str(error)
        for number in range(WARM_UP + steps):
            found = {}
            for name in order.sample(list(runs), len(runs)):
                try:
                    found[name] = runs[name].ask()
                except ContestantFailed as error:
                    if name != "deepspeed":
                        raise
                    absent[name] = str(error)
                    del runs[name]
            if found["pagert"]["loss"] != found["unpaged"]["loss"]:
                raise SystemExit(
                    f"step {number}: the losses of the paged and the unpaged run differ"
                )
            for name, one in found.items():
                if number >= WARM_UP:
                    taken.setdefault(name, []).append(one)
        for name, contestant in runs.items():
            rows[name] = {
                "seconds": spread([one["seconds"] for one in taken[name]]),
                "read_bytes": statistics.median(one["storage_bytes"][0] for one in taken[name]),
                "written_bytes": statistics.median(one["storage_bytes"][1] for one in taken[name]),
                "peak_bytes": max(one["peak_bytes"] for one in taken[name]),
                "processor_seconds": statistics.median(sum(one["processor"].values()) for one in taken[name]),
                "losses": [float.fromhex(one["loss"]) for one in taken[name]],
                "last_loss": float.fromhex(taken[name][-1]["loss"]),
                "settings": contestant.ready,
            }  # fmt: skip
    return {"job": asdict(job), "rows": rows, "absent": absent}


def report(figures: dict[str, Any]) -> None:
    """Print the table."""
    rows = figures["rows"]
    print(f"\n{'a step':<12}{'seconds: median (min to max)':>31}{'of pagert':>11}{'read GB':>9}{'written GB':>12}"
          f"{'peak RSS MiB':>14}{'processor s':>13}{'last loss':>12}")  # fmt: skip
    for name, row in rows.items():
        seconds = row["seconds"]
        text = f"{seconds['median']:.2f} ({seconds['min']:.2f} to {seconds['max']:.2f})"
        row["of_pagert"] = seconds["median"] / rows["pagert"]["seconds"]["median"]
        print(f"{name:<12}{text:>31}{row['of_pagert']:>11.2f}{row['read_bytes'] / 1e9:>9.3f}"
              f"{row['written_bytes'] / 1e9:>12.3f}{row['peak_bytes'] / MIB:>14.0f}"
              f"{row['processor_seconds']:>13.2f}{row['last_loss']:>12.6f}")  # fmt: skip
    for name, reason in figures["absent"].items():
        print(f"{name:<12}  {reason}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and print; the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".", help="where flash lies (default: here)")
    parser.add_argument("--smoke", action="store_true", help="small and quick: does it run at all")
    parser.add_argument("--deepspeed", action="store_true", help="at the smoke size as well")
    parser.add_argument("--steps", type=int, help="steps that count")
    parser.add_argument("--policy", default="lookahead", help="of the pager (lookahead)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    machine = machine_facts(chosen.folder)
    for key, value in machine.items():
        print(f"{key:>16}: {value}")
    job = next(job for job in (SMOKE if chosen.smoke else FULL) if job.name == "made")
    folder = tempfile.mkdtemp(prefix=".bench-peers-", dir=chosen.folder)
    print(f"{'job':>16}: {asdict(job)}")
    print(f"{'deepspeed':>16}: {json.dumps(deepspeed_settings(job, chosen.folder))}")
    try:
        settings = {"folder": folder, "policy": chosen.policy}
        left_out = {}
        if chosen.smoke and not chosen.deepspeed:
            left_out["deepspeed"] = (
                "not asked for: its first start compiles for minutes (--deepspeed)"
            )
        steps = chosen.steps or (2 if chosen.smoke else 5)
        figures = run(job, settings, steps, chosen.seed, left_out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(figures)
    figures["machine"] = machine
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


if __name__ == "__main__" and not serve({"contest": contest, "deepspeed": deepspeed}):
    main()
