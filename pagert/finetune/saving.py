# SPDX-License-Identifier: Apache-2.0
"""Write a tuned model as a Hugging Face folder, one tensor at a time, whole or not at all.

The folder is written beside its target under another name, forced to the disk and then renamed, so
that at every moment the target is either the finished model or what it was before.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from pagert.files import save
from pagert.files.replace import force_to_disk
from pagert.finetune.errors import OutputExists
from pagert.finetune.model import stored_tensors

__all__ = ["check_target", "save_model"]

# Tokenizer, configuration and header beside the weights.
_SPARE_BYTES = 32 * 2**20


def check_target(target: Path, weights_bytes: int = 0) -> None:
    """Check, before any work is done, that a model can be written there.

    Raises
    ------
    OutputExists
        Where the folder exists and holds something.
    OSError
        Where its parent is missing or cannot be written, or has no space for `weights_bytes`.
    """
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise OutputExists(
            f"--out {target}: exists and is not an empty folder; name another one, or remove it"
        )
    parent = target.absolute().parent
    if not parent.is_dir():
        raise FileNotFoundError(f"--out {target}: the folder {parent} does not exist; create it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"--out {target}: the folder {parent} cannot be written to; name another one"
        )
    free_bytes = shutil.disk_usage(parent).free
    if weights_bytes and free_bytes < weights_bytes + _SPARE_BYTES:
        raise OSError(
            f"--out {target}: the model takes {weights_bytes + _SPARE_BYTES} bytes, {free_bytes} "
            "are free; "
            "free some space, or name a folder on another disk"
        )


def save_model(model: Any, tokenizer: Any, target: Path) -> None:
    """Write model, configuration and tokenizer to `target`, for plain transformers to load.

    Blocks until everything is on the disk. When it raises, for whatever reason, nothing is left
    behind.
    """
    tensors = list(stored_tensors(model))
    check_target(target, sum(tensor.numel() * tensor.element_size() for _, tensor in tensors))
    parent = target.absolute().parent
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=parent))
    try:
        model.config.dtype = torch.float32
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(partial)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        save(dict(tensors), partial / "model.safetensors")
        for path in [*partial.rglob("*"), partial]:
            force_to_disk(path)
        partial.chmod(0o777 & ~_current_umask())
        partial.rename(target.absolute())
        force_to_disk(parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
