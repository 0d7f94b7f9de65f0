# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, and a text, made on the spot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

WORDS = (
    "the of and that he shall unto lord his king house came children day land men said".split()  # noqa: SIM905
)


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


LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def make_random_model(**changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"vocab_size": 300} if "model_type" in changes else LLAMA
    config = AutoConfig.for_model(**(settings | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model.eval()


@pytest.fixture(scope="session")
def random_model() -> Callable:
    """Make a tiny model, a Llama of two layers where nothing else is asked for.

    Its weights are random, those of biases and norms too, so that none can be mixed up unseen.
    """
    return make_random_model


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
    make_random_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
