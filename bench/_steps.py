# SPDX-License-Identifier: Apache-2.0
"""Training jobs that a contestant takes step by step, with a pager or without.

They are the one of `make demo`, and a transformer made on the spot; fp32, fused AdamW after the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from _apart import Answer, forget_peak, storage_bytes, thread_seconds

__all__ = ["FULL", "SMOKE", "Job", "contest", "made_batches", "made_model"]

MIB = 1 << 20
COUNTERS = ("flash_read_bytes", "flash_written_bytes", "stall_seconds", "faults", "hits", "prefetches", "evictions",
            "moved_bytes", "filled_bytes")  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A training job, and the budgets of its paged run."""

    name: str
    device_bytes: int
    flash_bytes: int
    page_bytes: int | None = None
    vocabulary: int = 0
    width: int = 0
    layers: int = 0
    batch: int = 2
    seq: int = 128


FULL = [
    Job("smollm2", 512 * MIB, 4096 * MIB),
    Job("made", 384 * MIB, 4096 * MIB, vocabulary=16000, width=768, layers=12, batch=4),
]
SMOKE = [
    Job("made", 4 * MIB, 64 * MIB, page_bytes=4096, vocabulary=500, width=128, layers=3, seq=32),
]


class Output(NamedTuple):
    """What models of transformers return, as far as the training loop looks at it."""

    logits: Any


def smollm2(job: Job, pager: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """Load the model of `make demo`; its optimizer and its batches."""
    import torch

    from pagert.finetune.model import build_empty, fill
    from pagert.finetune.source import open_source
    from pagert.finetune.text import Windows, tokenise
    from pagert.finetune.training import make_optimizer

    source = open_source("smollm2")
    config = source.config()
    tokens = tokenise(source.tokenizer(), "kjv", 16 * MIB, config.vocab_size)
    windows = Windows(tokens, batch=job.batch, seq=job.seq, seed=0)
    model = build_empty(config)
    fill(model, source, torch.device("cpu"), pager)
    source.close()
    if pager is not None:
        pager.page_(model)
    return model, make_optimizer("adamw", model, 2e-5), windows.next_batch


def made_model(job: Job) -> Any:
    """Build a transformer with random weights."""
    import torch
    from _training import LanguageModel

    class Named(LanguageModel):
        """Called as the models of transformers are."""

        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Output:
            return Output(super().forward(input_ids))

    return Named(job.vocabulary, job.width, job.layers)


def made_batches(job: Job) -> Callable[[], Any]:
    """Random tokens, the same each time."""
    import torch

    generator = torch.Generator().manual_seed(2)

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (job.batch, job.seq + 1)
        tokens = torch.randint(job.vocabulary, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return next_batch


def made(job: Job, pager: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """Build the made transformer, its optimizer and its batches."""
    from pagert.finetune.training import make_optimizer

    model = made_model(job)
    if pager is not None:
        pager.page_(model)
    return model, make_optimizer("adamw", model, 2e-5), made_batches(job)


@contextlib.contextmanager
def contest(settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Answer]]:
    """Train, one step for each question, with a pager or without."""
    import torch

    import pagert
    from pagert.finetune import memory
    from pagert.finetune.training import repeatable, train

    job = Job(**settings["job"])
    if settings["paged"]:  # the unpaged step is PyTorch as it comes
        memory.keep_heap_small()
    with contextlib.ExitStack() as stack:
        stack.enter_context(repeatable(0))
        pager = None
        if settings["paged"]:
            pager = stack.enter_context(
                pagert.Pager(
                    device="cpu", device_bytes=job.device_bytes, flash_path=settings["folder"],
                    flash_bytes=job.flash_bytes, page_bytes=job.page_bytes, policy=settings["policy"],
                )
            )  # fmt: skip
        torch.manual_seed(0)
        model, optimizer, next_batch = (smollm2 if job.name == "smollm2" else made)(job, pager)
        state_bytes = 4 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
        saving: Any = contextlib.nullcontext
        if pager is not None:  # as pagert finetune trains
            pager.step_in_backward(optimizer)
            saving = functools.partial(pager.activations, module=model)
        memory.return_free_memory()
        forget_peak()
        steps = train(
            model, optimizer, next_batch, device=torch.device("cpu"), steps=1 << 30, accumulate=1, saving=saving
        )

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            before, threads, storage = pager and pager.stats(), thread_seconds(), storage_bytes()
            loss, seconds, _ = next(steps)
            found: dict[str, Any] = {"loss": loss.hex(), "seconds": seconds}
            found["storage_bytes"] = [b - a for a, b in zip(storage, storage_bytes(), strict=True)]
            found["peak_bytes"] = memory.peak_rss_bytes()
            found["processor"] = {
                name: used - threads.get(name, 0.0) for name, used in thread_seconds().items()
            }
            if pager is not None:
                after = pager.stats()
                found |= {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
            return found

        yield {"state_bytes": state_bytes, "threads": torch.get_num_threads(),
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
               "page_bytes": pager.page_bytes if pager else None}, answer  # fmt: skip
