# SPDX-License-Identifier: Apache-2.0
"""Where a model comes from: a Hugging Face folder or a GGUF file, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from pagert.finetune.errors import BadModel, UnsupportedModel
from pagert.finetune.extra import load
from pagert.finetune.packaged import PACKAGED_MODELS, resolve

__all__ = ["FolderSource", "ModelSource", "as_trained", "open_source"]

# A mapping's touched pages count as resident. The file is mapped anew after this many bytes.
_MAPPED_BYTES_MAX = 64 * 2**20


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
        self._safetensors = load("safetensors")
        if not (path / "config.json").is_file():
            raise BadModel(
                f"--model {path}: the folder has no config.json; give the folder of a Hugging "
                "Face model"
            )
        self._file_of = self._find_tensors()
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
        stored_as = {}
        for name in names:
            bare = name.removeprefix(f"{base_prefix}.")
            stored = name if name in self._file_of else bare
            if stored in self._file_of:
                stored_as[stored] = name
        for file in sorted(set(self._file_of.values())):
            inside = [stored for stored in stored_as if self._file_of[stored] == file]
            for group in self._groups(file, inside):
                with self._open(file) as tensors:
                    for stored in group:
                        self._yielded.add(stored)
                        yield stored_as[stored], as_trained(tensors.get_tensor(stored).clone())

    def unused(self) -> list[str]:
        return sorted(set(self._file_of) - self._yielded)

    def close(self) -> None:
        self._file_of.clear()

    def _groups(self, file: Path, names: list[str]) -> Iterator[list[str]]:
        """Split the tensors of a file: no more than `_MAPPED_BYTES_MAX` are mapped at a time."""
        group: list[str] = []
        group_bytes = 0
        with self._open(file) as tensors:
            sizes = {name: _slice_bytes(tensors.get_slice(name)) for name in names}
        for name in names:
            if group and group_bytes + sizes[name] > _MAPPED_BYTES_MAX:
                yield group
                group, group_bytes = [], 0
            group.append(name)
            group_bytes += sizes[name]
        if group:
            yield group

    def _open(self, file: Path) -> Any:
        try:
            return self._safetensors.safe_open(file, framework="pt", device="cpu")
        except (self._safetensors.SafetensorError, OSError) as error:
            raise BadModel(
                f"{file}: not a whole safetensors file: {error}; fetch it again"
            ) from error

    def _find_tensors(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                file_of = {name: self.path / file for name, file in weight_map.items()}
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise BadModel(
                    f"{index}: not an index of safetensors: {error!r}; fetch it again"
                ) from error
            missing = sorted({file.name for file in file_of.values() if not file.is_file()})
            if missing:
                raise BadModel(
                    f"--model {self.path}: {len(missing)} shards of the index are missing: "
                    f"{', '.join(missing)}; fetch them"
                )
            return file_of
        single = self.path / "model.safetensors"
        if single.is_file():
            with self._open(single) as tensors:
                return dict.fromkeys(tensors.keys(), single)
        there = sorted(file.name for file in self.path.glob("*.bin"))
        raise UnsupportedModel(
            f"--model {self.path}: no model.safetensors and no model.safetensors.index.json in "
            "the folder"
            + (f", only {', '.join(there)}" if there else "")
            + "; save the model with save_pretrained of a current transformers"
        )


def _slice_bytes(stored: Any) -> int:
    # The name of a stored type ends with its bits (F32, BF16, I64, F8_E4M3); 8 bytes is the most.
    count = 1
    for size in stored.get_shape():
        count *= size
    digits = "".join(letter for letter in stored.get_dtype().split("_")[0] if letter.isdigit())
    return count * max(1, int(digits or 8) // 8)
