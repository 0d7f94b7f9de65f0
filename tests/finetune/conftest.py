# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, and a text, made on the spot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import llama_config, random_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")

WORDS = "the of and that he shall unto lord his king house came children day land men said".split()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of about 3,000 words in lines."""
    generator = torch.Generator().manual_seed(1)
    words = [WORDS[index] for index in torch.randint(0, len(WORDS), (3000,), generator=generator)]
    lines = [" ".join(words[first : first + 12]) for first in range(0, len(words), 12)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(text_file: Path):
    """A byte-level BPE tokenizer of 300 tokens, learnt from the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train(
        [str(text_file)],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@pytest.fixture
def make_folder(tmp_path: Path, tokenizer) -> Callable[..., Path]:
    """Save a model as a Hugging Face folder."""

    def make(model, name: str = "model", **options) -> Path:
        folder = tmp_path / name
        model.save_pretrained(folder, **options)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A folder with a tiny Llama; not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    random_model(llama_config()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
