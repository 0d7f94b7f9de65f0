# SPDX-License-Identifier: Apache-2.0
"""Where a model comes from: a Hugging Face folder or a GGUF file, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from pagert.errors import CheckpointError
from pagert.files.checkpoint import INDEX_END, Checkpoint
from pagert.finetune.errors import BadModel, UnsupportedModel
from pagert.finetune.extra import load
from pagert.finetune.packaged import PACKAGED_MODELS, resolve

__all__ = ["FolderSource", "ModelSource", "as_trained", "open_source"]


class ModelSource(Protocol):
    """A model on disk."""

    path: Path

    def config(self) -> Any:
        """Build the configuration (a transformers `PretrainedConfig`)."""

    def tensors(
        self, names: Collection[str], base_prefix: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that a model's state has under these names, each once, in any order.

        Names that the file lacks are left out. A tensor is plain, on the CPU and the caller's own.
        """

    def tokenizer(self) -> Any:
        """Build the tokenizer (a transformers `PreTrainedTokenizerBase`)."""

    def unused(self) -> list[str]:
        """Name the tensors of the file that `tensors` did not yield."""

    def close(self) -> None:
        """Let go of the file. Only the tokenizer can be asked for afterwards."""


def open_source(model: str) -> ModelSource:
    """Open a model by path, or by the name of a packaged one.

    Raises
    ------
    BadModel
        Where there is nothing, or nothing complete, at that path.
    UnsupportedModel
        Where the format is another one.
    """
    path = resolve(model, PACKAGED_MODELS)
    if path.is_dir():
        return FolderSource(path)
    if not path.exists():
        raise BadModel(
            f"--model {model}: no such file or folder; give a folder with config.json and "
            "safetensors, a GGUF file, "
            f"or one of {', '.join(sorted(PACKAGED_MODELS))}"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UnsupportedModel(
            f"--model {model}: not a GGUF file (it starts with {magic!r}); "
            "for safetensors give the folder that holds them together with config.json"
        )
    from pagert.finetune.gguf_source import GgufSource

    return GgufSource(path)


def as_trained(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in the precision of training: float32 for floats, other types as they are."""
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


class FolderSource:
    """A Hugging Face folder: config.json, safetensors in one file or in shards, tokenizer files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise BadModel(
                f"--model {path}: the folder has no config.json; give the folder of a Hugging "
                "Face model"
            )
        self._checkpoint = self._open()
        self._yielded: set[str] = set()

    def config(self) -> Any:
        transformers = load("transformers")
        try:
            config = transformers.AutoConfig.from_pretrained(self.path, local_files_only=True)
        except (ValueError, KeyError, OSError) as error:
            raise UnsupportedModel(
                f"--model {self.path}: transformers {transformers.__version__} does not know "
                f"this config.json: {error}"
            ) from error
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedModel(
                f"--model {self.path}: the weights are quantized ({config.quantization_config!r}); "
                "give the model in float32, float16 or bfloat16"
            )
        return config

    def tokenizer(self) -> Any:
        transformers = load("transformers")
        try:
            return transformers.AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except (ValueError, KeyError, OSError) as error:
            raise BadModel(
                f"--model {self.path}: no usable tokenizer files in the folder: {error}"
            ) from error

    def tensors(
        self, names: Collection[str], base_prefix: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        # Checkpoints of the bare model lack the prefix under which a causal language model holds
        # it.
        in_files = self._checkpoint.tensors
        stored_as = {}
        for name in names:
            stored = name if name in in_files else name.removeprefix(f"{base_prefix}.")
            if stored in in_files:
                stored_as[stored] = name
        for stored, name in stored_as.items():
            self._yielded.add(stored)
            yield name, as_trained(self._checkpoint.read(in_files[stored]))

    def unused(self) -> list[str]:
        return sorted(set(self._checkpoint.tensors) - self._yielded)

    def close(self) -> None:
        self._checkpoint.close()

    def _open(self) -> Checkpoint:
        index, single = (self.path / f"model.safetensors{end}" for end in (INDEX_END, ""))
        found = index if index.is_file() else single
        if not found.is_file():
            there = sorted(file.name for file in self.path.glob("*.bin"))
            raise UnsupportedModel(
                f"--model {self.path}: no model.safetensors and no model.safetensors.index.json in "
                "the folder"
                + (f", only {', '.join(there)}" if there else "")
                + "; save the model with save_pretrained of a current transformers"
            )
        try:
            return Checkpoint(found)
        except (CheckpointError, OSError) as error:
            raise BadModel(f"--model {self.path}: {error}") from error
