# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every architecture in transformers, made from config, and inputs for them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PARAMETERS_MAX = 3_000_000
VOCABULARY = 128

# In this order: an architecture is tried as the first of these that it has, then as the others.
TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "ctc": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "base": modeling_auto.MODEL_MAPPING_NAMES,
}

# What the fields of configurations are called; those that a class does not have are left out.
WIDTH, HEADS, LAYERS, INNER = 32, 4, 2, 64
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), WIDTH),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "output_hidden_size"), WIDTH),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "projection_dim"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), WIDTH // HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), INNER),
    **dict.fromkeys(("shared_expert_intermediate_size", "dim_ff", "ff_dim"), INNER),
    "vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 8,
    "image_size": 32,
    "patch_size": 8,
    "sliding_window": 16,
    **dict.fromkeys(("mamba_d_state", "state_size"), 8),
    "conv_dim": (WIDTH, WIDTH),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "decoder_start_token_id"), 2),
}
# Without which something does not fit together.
OWN: dict[str, dict[str, Any]] = {}


def names() -> list[str]:
    """The types of configuration that transformers has a model for."""
    known = {name for task in TASKS.values() for name in task}
    return sorted(name for name in CONFIG_MAPPING if name in known)


def tiny_config(name: str) -> Any:
    return _shrink(CONFIG_MAPPING[name], OWN.get(name, {}))


def _shrink(kind: Any, own: dict[str, Any]) -> Any:
    default = kind()
    fields = {key: value for key, value in SIZES.items() if _has(kind, default, key)}
    layers = getattr(default, "layer_types", None)
    if isinstance(layers, list) and "num_hidden_layers" in fields:
        fields["layer_types"] = [layers[0], layers[-1]]
    for key in getattr(default, "sub_configs", {}):
        part = getattr(default, key, None)
        if isinstance(part, transformers.PretrainedConfig):
            fields[key] = _shrink(type(part), {}).to_dict()
    for key, value in vars(default).items():
        if isinstance(value, (list, tuple)) and key in ("hidden_sizes", "embed_dims", "dims"):
            fields[key] = [16 * (i + 1) for i in range(len(value))]
        elif isinstance(value, (list, tuple)) and key in ("depths", "num_blocks", "layers"):
            fields[key] = [1] * len(value)
    config = kind(**{**fields, **own})
    with contextlib.suppress(AttributeError, NotImplementedError):
        config.use_cache = False
    return config


def _has(kind: Any, default: Any, key: str) -> bool:
    if key not in vars(default) and key not in inspect.signature(kind.__init__).parameters:
        return False
    value = getattr(default, key, None)
    if isinstance(SIZES[key], tuple):
        return value is None or isinstance(value, (list, tuple))
    return value is None or isinstance(value, int)


def candidates(name: str) -> Iterator[tuple[str, Any]]:
    """Tasks and model classes of an architecture."""
    for task, mapping in TASKS.items():
        found = mapping.get(name)
        for one in (found,) if isinstance(found, str) else found or ():
            kind = getattr(transformers, one, None)
            if kind is not None:
                yield task, kind


def build(kind: Any, config: Any) -> torch.nn.Module:
    """Make the model, if it is small. The seed is the caller's."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > PARAMETERS_MAX:
        raise ValueError(f"{count} parameters are too many for a test")
    return kind(config).train()


def inputs(task: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the forward pass is given. The loss is the model's, or made of its first result."""
    config: Any = model.config
    taken = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 100, (2, 12), generator=generator)
    labels = torch.tensor([0, 1])
    channels = getattr(config, "num_channels", 3) or 3
    size = getattr(config, "image_size", 32) or 32
    height, width = (size, size) if isinstance(size, int) else size
    given: dict[str, torch.Tensor] = {}
    if model.main_input_name == "pixel_values":
        given["pixel_values"] = torch.randn(2, channels, height, width, generator=generator)
    elif model.main_input_name == "input_values":
        given["input_values"] = torch.randn(2, 2000, generator=generator)
    elif model.main_input_name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 80)
        shape = (2, 40, bins) if "attention_mask" in taken else (2, bins, 40)
        given["input_features"] = torch.randn(shape, generator=generator)
    else:
        given["input_ids"] = tokens
    if "pixel_values" in taken and "input_ids" in given and task == "base":
        given["pixel_values"] = torch.randn(2, channels, height, width, generator=generator)
    if task == "seq2seq" or (task == "base" and "decoder_input_ids" in taken):
        given["decoder_input_ids"] = tokens[:, :8]
    if "labels" in taken:
        if task in ("causal", "masked"):
            given["labels"] = tokens
        elif task == "seq2seq":
            given["labels"] = tokens[:, :8]
        elif task in ("sequence", "image", "audio"):
            given["labels"] = labels
    return given


def loss_of(output: Any) -> torch.Tensor:
    """The model's loss, or the mean square of every floating result."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    parts = [value for value in output.to_tuple() if isinstance(value, torch.Tensor)]
    floating = [value.float().square().mean() for value in parts if value.is_floating_point()]
    return sum(floating[1:], floating[0])
