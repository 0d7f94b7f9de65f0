# SPDX-License-Identifier: Apache-2.0
"""A model in a GGUF file: configuration and tokenizer from metadata, tensors one by one.

Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from pagert.finetune.errors import BadModel, UnsupportedModel
from pagert.finetune.extra import load

__all__ = ["GgufSource"]

# De-quantising makes several temporary arrays of the size of its result: rows are taken in parts.
_ELEMENTS_AT_ONCE = 2**20


class GgufSource:
    """A GGUF file of one of the architectures in `_CONFIGS`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = load("gguf")
        try:
            self._reader = self._gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise BadModel(
                f"--model {path}: not a whole GGUF file: {error}; fetch it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._yielded: set[str] = set()
        self._architecture = str(self._value("general.architecture", default=""))
        self._digits_apart = self._value("tokenizer.ggml.pre", default="") == "smollm"
        self._check_supported()

    def config(self) -> Any:
        return _CONFIGS[self._architecture](self)

    def tokenizer(self) -> Any:
        transformers = load("transformers")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True
            )
        except (ValueError, KeyError, OSError, ImportError) as error:
            raise BadModel(
                f"--model {self.path}: no usable tokenizer in the metadata: {error}"
            ) from error
        if self._digits_apart:
            _split_digits(tokenizer)
        return tokenizer

    def tensors(
        self, names: Collection[str], base_prefix: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        del base_prefix  # names in the file follow gguf's own scheme
        architecture = next(
            key for key, value in self._gguf.MODEL_ARCH_NAMES.items() if value == self._architecture
        )
        name_map = self._gguf.get_tensor_name_map(architecture, self._count("block_count"))
        for name in names:
            stem, _, suffix = name.rpartition(".")
            stored = f"{name_map.get_name(stem)}.{suffix}"
            if stored in self._tensors:
                self._yielded.add(stored)
                yield name, self._dequantised(stored)

    def unused(self) -> list[str]:
        return sorted(set(self._tensors) - self._yielded)

    def close(self) -> None:
        self._tensors.clear()
        del self._reader

    def _dequantised(self, stored: str) -> torch.Tensor:
        tensor = self._tensors[stored]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        result = numpy.empty((rows.shape[0], shape[-1]), dtype=numpy.float32)
        step = max(1, _ELEMENTS_AT_ONCE // max(1, shape[-1]))
        try:
            for first in range(0, rows.shape[0], step):
                part = self._gguf.quants.dequantize(rows[first : first + step], tensor.tensor_type)
                result[first : first + step] = part
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"--model {self.path}: {stored} is stored as {tensor.tensor_type.name}, which "
                "gguf cannot de-quantise; "
                "convert the model to Q8_0, F16 or F32"
            ) from error
        _forget_mapped_pages(self._reader.data)
        result = result.reshape(shape)
        if self._architecture == "llama" and (".attn_q." in stored or ".attn_k." in stored):
            heads = "attention.head_count" if ".attn_q." in stored else "attention.head_count_kv"
            result = _unpermuted(result, self._count(heads))
        return torch.from_numpy(result)

    def _check_supported(self) -> None:
        if self._architecture not in _CONFIGS:
            raise UnsupportedModel(
                f"--model {self.path}: architecture {self._architecture!r}; from GGUF these are "
                "supported: "
                f"{', '.join(sorted(_CONFIGS))}; give other models as a Hugging Face folder"
            )
        reason = None
        if int(self._value("split.count", default=1)) > 1:
            reason = "it is one part of a split file; merge the parts first"
        elif self._value(f"{self._architecture}.rope.scaling.type", default="none") not in (
            "none",
            "",
        ):
            reason = "its rotary frequencies are scaled; give it as a Hugging Face folder"
        elif any(name.startswith("rope_f") for name in self._tensors):
            reason = "it brings rotary frequencies of its own; give it as a Hugging Face folder"
        elif int(self._value(f"{self._architecture}.expert_count", default=0)) > 0:
            reason = "it is a mixture of experts; give it as a Hugging Face folder"
        elif (
            "rope.dimension_count" in self._keys()
            and self._count("rope.dimension_count") != self._head_width()
        ):
            reason = "only a part of each head is rotated; give it as a Hugging Face folder"
        if reason is not None:
            raise UnsupportedModel(f"--model {self.path}: {reason}")

    def _keys(self) -> set[str]:
        prefix = f"{self._architecture}."
        return {key.removeprefix(prefix) for key in self._reader.fields if key.startswith(prefix)}

    def _head_width(self) -> int:
        if "attention.key_length" in self._keys():
            return self._count("attention.key_length")
        return self._count("embedding_length") // self._count("attention.head_count")

    def _value(self, key: str, *, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise BadModel(
                f"--model {self.path}: the metadata has no {key}; convert the model again"
            )
        return default

    def _count(self, key: str) -> int:
        value = self._value(f"{self._architecture}.{key}")
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModel(
                f"--model {self.path}: {self._architecture}.{key} is {value!r}, not one number "
                "of at least 1"
            )
        return value

    def _common_config(self) -> dict[str, Any]:
        heads = self._count("attention.head_count")
        grouped = "attention.head_count_kv" in self._keys()
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise BadModel(
                f"--model {self.path}: the file has no token_embd.weight; convert the model again"
            )
        tokens = {
            f"{role}_token_id": self._value(f"tokenizer.ggml.{key}_token_id", default=-1)
            for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        return {
            "hidden_size": self._count("embedding_length"),
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv") if grouped else heads,
            "head_dim": self._head_width(),
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": float(
                self._value(f"{self._architecture}.attention.layer_norm_rms_epsilon")
            ),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": float(
                    self._value(f"{self._architecture}.rope.freq_base", default=10000.0)
                ),
            },
            "vocab_size": int(embedding.shape[1]),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            **{role: token for role, token in tokens.items() if token >= 0},
        }

    def _llama_config(self) -> Any:
        return load("transformers").LlamaConfig(
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            mlp_bias="blk.0.ffn_up.bias" in self._tensors,
            **self._common_config(),
        )

    def _qwen2_config(self) -> Any:
        return load("transformers").Qwen2Config(**self._common_config())

    def _qwen3_config(self) -> Any:
        return load("transformers").Qwen3Config(
            attention_bias="blk.0.attn_q.bias" in self._tensors, **self._common_config()
        )


_CONFIGS: dict[str, Callable[[GgufSource], Any]] = {
    "llama": GgufSource._llama_config,
    "qwen2": GgufSource._qwen2_config,
    "qwen3": GgufSource._qwen3_config,
}


def _unpermuted(rows: numpy.ndarray, head_count: int) -> numpy.ndarray:
    """Undo GGUF's order of a Llama head's rows: pairs side by side there, two halves here."""
    pairs = rows.reshape(head_count, rows.shape[0] // head_count // 2, 2, *rows.shape[1:])
    return numpy.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _forget_mapped_pages(data: numpy.ndarray) -> None:
    """Drop the file's pages from the resident set; they are read again where needed."""
    mapping: object = data.base
    if isinstance(mapping, mmap.mmap):
        mapping.madvise(mmap.MADV_DONTNEED)


def _split_digits(tokenizer: Any) -> None:
    """Take each digit by itself before the byte level, as this vocabulary was made."""
    pre_tokenizers = load("tokenizers").pre_tokenizers
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
