# SPDX-License-Identifier: Apache-2.0
"""The settings of one fine-tuning job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `pagert finetune` was asked for. Sizes stay as written: the pager reads them."""

    model: str
    text: str
    steps: int = 10
    batch: int = 2
    seq: int = 128
    accumulate: int = 1
    lr: float = 2e-5
    optimizer: str = "adamw"
    seed: int = 0
    eval_batches: int = 8
    text_limit: str = "16MiB"
    device: str = "auto"
    device_bytes: str = "512MiB"
    host_bytes: str | None = None
    flash_path: Path | None = None
    flash_bytes: str | None = None
    page_bytes: str | None = None
    policy: str = "lookahead"
    step_after_backward: bool = False
    plain_activations: bool = False
    unpaged: bool = False
    out: Path | None = None
    compare: bool = False
    json: Path | None = None
    plain: bool = False
