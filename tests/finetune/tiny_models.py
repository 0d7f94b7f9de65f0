# SPDX-License-Identifier: Apache-2.0
"""Configurations and models small enough for tests."""

from __future__ import annotations

import torch


def llama_config(**changes):
    """A Llama of two layers and 64 positions."""
    from transformers import LlamaConfig

    settings = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(settings | changes))


def random_model(config, seed: int = 0):
    """A model with random weights; biases and norms too, so that none can be mixed up unseen."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model.eval()
