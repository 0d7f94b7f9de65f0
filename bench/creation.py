# SPDX-License-Identifier: Apache-2.0
"""A model with more parameters than the memory it may have: made, loaded, trained, saved and loaded again.

    python bench/creation.py [--limit-mib 1024] [--parameters-mib 1536] [--flash-path FOLDER] [--smoke]

It runs in a process of its own within a memory cgroup, which counts what the process holds and what the OS keeps of its
files; where none can be made it runs without, and says so. The first load reads files that the safetensors library
wrote. After three steps the model is saved, made again, loaded, and compared with the first bit by bit. Beside each
phase stands the peak of what the process held (RSS), and in the end what the cgroup held at most.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _apart import Contestant, forget_peak, limit_memory, serve

MIB = 1 << 20


def _model(settings: dict[str, Any]) -> Any:
    from torch import nn

    width = settings["width"]
    layers = [nn.Linear(width, width) for _ in range(settings["layers"])]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def _write_checkpoint(folder: Path, settings: dict[str, Any]) -> None:
    """Write a file for each layer, with the library, and never more than a layer in memory."""
    import torch
    from safetensors.torch import save_file

    width = settings["width"]
    for number in range(settings["layers"]):
        generator = torch.Generator().manual_seed(number)
        tensors = {
            f"{2 * number}.weight": torch.randn(width, width, generator=generator) / width**0.5,
            f"{2 * number}.bias": torch.zeros(width),
        }
        save_file(tensors, folder / f"part{number:03}.safetensors")


@contextlib.contextmanager
def _train(settings: dict[str, Any]) -> Any:
    import torch

    import pagert
    from pagert.finetune.memory import keep_heap_small

    # As the job of `pagert finetune`: else what gradients leave behind in glibc's heap stays resident.
    keep_heap_small()
    torch.set_num_threads(settings["threads"])
    folder = Path(settings["folder"])
    budgets = {name: settings[name] for name in ("device_bytes", "flash_path", "flash_bytes")}

    def work(question: dict[str, Any]) -> dict[str, Any]:
        phases: dict[str, Any] = {}

        @contextlib.contextmanager
        def phase(name: str) -> Any:
            forget_peak()
            begin = time.perf_counter()
            yield
            phases[name] = {"seconds": time.perf_counter() - begin, "peak_rss_bytes": _peak_rss()}

        with pagert.Pager(device="cpu", **budgets) as pager:
            with phase("create"), pager.creating():
                model = _model(settings)
            with phase("load"):
                pager.load_(model, folder / "parts")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            x = torch.randn(8, settings["width"], generator=torch.Generator().manual_seed(0))
            with phase("3 steps"):
                losses = [_step(model, optimizer, x) for _ in range(3)]
            del optimizer
            with phase("save"):
                pagert.save(model, folder / "trained.safetensors")
            with phase("create again"), pager.creating():
                again = _model(settings)
            with phase("load again"):
                pager.load_(again, folder / "trained.safetensors")
            same = all(map(_equal, model.parameters(), again.parameters()))
        return {"phases": phases, "losses": losses, "same": same}

    yield {}, work


def _step(model: Any, optimizer: Any, x: Any) -> float:
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def _equal(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one.detach(), other.detach())


def _peak_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-mib", type=int, default=1024)
    parser.add_argument("--parameters-mib", type=int, default=1536)
    parser.add_argument("--device-mib", type=int, default=256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash-path", default=None, help="a folder on a disk, not on tmpfs")
    parser.add_argument("--smoke", action="store_true", help="a small size, to see that it works")
    options = parser.parse_args()
    if options.smoke:
        options.limit_mib, options.parameters_mib = 600, 12
        options.device_mib, options.width, options.threads = 2, 256, 1
    layer_bytes = 4 * options.width * (options.width + 1)
    layers = -(-options.parameters_mib * MIB // layer_bytes)
    with tempfile.TemporaryDirectory(dir=options.flash_path) as name:
        folder = Path(name)
        (folder / "parts").mkdir()
        settings: dict[str, Any] = {
            "width": options.width,
            "layers": layers,
            "threads": options.threads,
            "folder": name,
            "device_bytes": options.device_mib * MIB,
            "flash_path": name,
            "flash_bytes": 8 * layers * layer_bytes,
        }
        _write_checkpoint(folder / "parts", settings)
        limit, how = limit_memory("creation", options.limit_mib * MIB)
        print(
            f"{layers * layer_bytes / MIB:.0f} MiB of parameters, device {options.device_mib} MiB, "
            + (f"limit {options.limit_mib} MiB ({how})" if limit else f"no limit: {how}")
        )
        contestant = Contestant(__file__, "train", settings, limit)
        try:
            done = contestant.ask()
            peak = limit.peak_bytes() if limit else None
        finally:
            contestant.close()
    for phase, facts in done["phases"].items():
        print(
            f"{phase:14} {facts['seconds']:7.2f} s   peak RSS {facts['peak_rss_bytes'] / MIB:6.0f} MiB"
        )
    if peak is not None:
        print(f"the cgroup held at most {peak / MIB:.0f} of {options.limit_mib} MiB")
    print(f"losses {done['losses']}")
    print(f"loaded again bit for bit: {'yes' if done['same'] else 'NO'}")
    return 0 if done["same"] else 1


if __name__ == "__main__":
    if serve({"train": _train}):
        sys.exit(0)
    sys.exit(main())
