# SPDX-License-Identifier: Apache-2.0
"""The settings of one fine-tuning job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pagert.errors import ConfigurationError

__all__ = ["Settings", "parse_size"]


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
    policy: str = "lru"
    unpaged: bool = False
    out: Path | None = None
    compare: bool = False
    json: Path | None = None
    plain: bool = False


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(word: str | int, option: str) -> int:
    """Bytes of a size such as `16MiB`.

    Raises
    ------
    ConfigurationError
        Where it is not a positive number with one of the units B, KiB, MiB, GiB, TiB.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(word))
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ConfigurationError(
            f"{option}: {word!r} is not a size; write a number with B, KiB, MiB, GiB or TiB, "
            "such as 512MiB"
        )
    size_bytes = int(float(match[1]) * units[match[2].lower()])
    if size_bytes < 1:
        raise ConfigurationError(f"{option}: {word!r} is less than 1 byte; give a larger size")
    return size_bytes
