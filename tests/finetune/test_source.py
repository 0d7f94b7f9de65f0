# SPDX-License-Identifier: Apache-2.0
"""Models from folders and GGUF files; the oracle is transformers' own loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch

from pagert.finetune.errors import BadModel, MissingPackage, UnsupportedModel
from pagert.finetune.model import build_empty, fill, stored_tensors
from pagert.finetune.packaged import resolve
from pagert.finetune.source import open_source

pytest.importorskip("transformers", reason="the extra 'demo' is not installed")

CPU = torch.device("cpu")
INPUTS = torch.arange(3, 23).reshape(2, 10)


def load_with_pagert(path: Path):
    source = open_source(str(path))
    model = build_empty(source.config())
    assert all(tensor.is_meta for _, tensor in stored_tensors(model))
    fill(model, source, CPU, None)
    return model.eval()


def load_with_transformers(path: Path, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(INPUTS).logits


def assert_same_model(model, expected) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == torch.float32
        assert torch.equal(ours[name], tensor), name
    assert torch.equal(logits(model), logits(expected))


SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
SHAPES = {
    "llama, tied": {},
    "llama, untied": {"tie_word_embeddings": False},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with scaled frequencies": {"rope_parameters": SCALED},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2},
    "qwen3": QWEN3,
}


@pytest.mark.parametrize("name", SHAPES)
def test_folder_loads_to_the_bits_of_transformers(name, make_folder, random_model) -> None:
    folder = make_folder(random_model(**SHAPES[name]))
    assert_same_model(load_with_pagert(folder), load_with_transformers(folder))


def test_shards_load_to_the_bits_of_transformers(make_folder, random_model) -> None:
    folder = make_folder(random_model(), max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert_same_model(load_with_pagert(folder), load_with_transformers(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folder_is_widened_to_float32(dtype, make_folder, random_model) -> None:
    folder = make_folder(random_model().to(dtype))
    assert_same_model(load_with_pagert(folder), load_with_transformers(folder))


def test_checkpoint_of_the_bare_model_loads(make_folder, random_model) -> None:
    model = random_model()
    folder = make_folder(model.model)
    assert torch.equal(logits(load_with_pagert(folder)), logits(model))


def test_ties_are_kept(random_model) -> None:
    model = build_empty(random_model().config)
    assert [name for name, _ in stored_tensors(model)].count("lm_head.weight") == 0
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_filled_model_keeps_ties(model_folder) -> None:
    model = load_with_pagert(model_folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta


def write_gguf(path: Path, model, tokenizer, quantization, architecture: str = "llama") -> None:
    """Write a GGUF file by its specification, with gguf's own writer."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_width = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_rope_dimension_count(head_width)
    if architecture == "qwen3":
        writer.add_key_length(head_width)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(backend["vocab"], key=backend["vocab"].get))
    writer.add_token_types([3] + [1] * (len(backend["vocab"]) - 1))
    writer.add_token_merges([" ".join(merge) for merge in backend["merges"]])
    writer.add_eos_token_id(0)
    key = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        rows = tensor.detach().numpy()
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if part in stem and architecture == "llama":
                # The file has a head's rows in pairs: first of each half, second of each half, ...
                order = numpy.arange(rows.shape[0]).reshape(heads, 2, -1).transpose(0, 2, 1).ravel()
                rows = rows[order]
        if rows.ndim > 1 and quantization is not None:
            writer.add_tensor(
                f"{names.get_name(stem)}.{suffix}",
                gguf.quants.quantize(rows, quantization),
                raw_dtype=quantization,
            )
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", numpy.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"num_key_value_heads": 4}], ids=str
)
def test_gguf_in_float32_gives_back_the_model_it_was_made_of(
    changes, tmp_path, tokenizer, random_model
) -> None:
    expected = random_model(**changes)
    write_gguf(tmp_path / "tiny.gguf", expected, tokenizer, None)
    assert_same_model(load_with_pagert(tmp_path / "tiny.gguf"), expected)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantized_gguf_loads_to_the_bits_of_transformers(
    name, tmp_path, tokenizer, random_model
) -> None:
    import gguf

    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_model(), tokenizer, gguf.GGMLQuantizationType[name])
    expected = load_with_transformers(tmp_path, gguf_file=path.name)
    assert torch.equal(logits(load_with_pagert(path)), logits(expected))


def test_gguf_of_qwen3_gives_back_the_model_it_was_made_of(
    tmp_path, tokenizer, random_model
) -> None:
    expected = random_model(**QWEN3)
    write_gguf(tmp_path / "tiny.gguf", expected, tokenizer, None, "qwen3")
    model = load_with_pagert(tmp_path / "tiny.gguf")
    assert torch.equal(logits(model), logits(expected))


def test_gguf_rows_in_parts_are_the_rows_in_one(
    tmp_path, tokenizer, monkeypatch, random_model
) -> None:
    import gguf

    import pagert.finetune.gguf_source as subject

    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_model(), tokenizer, gguf.GGMLQuantizationType.Q8_0)
    whole = load_with_pagert(path)
    monkeypatch.setattr(subject, "_ELEMENTS_AT_ONCE", 7 * 64)
    assert_same_model(load_with_pagert(path), whole)


def test_gguf_tokenizer_takes_digits_one_by_one(tmp_path, tokenizer, random_model) -> None:
    write_gguf(tmp_path / "tiny.gguf", random_model(), tokenizer, None)
    made = open_source(str(tmp_path / "tiny.gguf")).tokenizer()
    ids = made("the king 1984", add_special_tokens=False)["input_ids"]
    assert made.convert_ids_to_tokens(ids)[-5:] == ["Ġ", "1", "9", "8", "4"]
    assert made.decode(ids) == "the king 1984"


def test_gguf_of_another_architecture_is_refused_with_the_list(tmp_path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"'rwkv7'.*llama, qwen2, qwen3"):
        open_source(str(tmp_path / "other.gguf"))


def test_truncated_gguf_is_refused(tmp_path, tokenizer, random_model) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_model(), tokenizer, None)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadModel, match="not a whole GGUF file"):
        open_source(str(path))


def test_truncated_safetensors_is_refused(make_folder, random_model) -> None:
    folder = make_folder(random_model())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadModel, match="no whole safetensors file"):
        load_with_pagert(folder)


def test_missing_shard_is_named(make_folder, random_model) -> None:
    folder = make_folder(random_model(), max_shard_size="50KB")
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(BadModel, match=victim.name):
        open_source(str(folder))


def test_missing_tensor_is_named(make_folder, random_model) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_folder(random_model())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        BadModel, match=r"1 of \d+ tensors .*model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_with_pagert(folder)


def test_tensor_of_another_shape_is_named_with_both_shapes(make_folder, random_model) -> None:
    folder = make_folder(random_model())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(BadModel, match=r"\(64, 128\).*\(64, 96\)|\(128, 64\).*\(96, 64\)"):
        load_with_pagert(folder)


def test_unknown_model_type_is_refused(model_folder, tmp_path) -> None:
    shutil.copytree(model_folder, tmp_path / "copy")
    config = json.loads((tmp_path / "copy/config.json").read_text())
    (tmp_path / "copy/config.json").write_text(json.dumps(config | {"model_type": "abacus"}))
    with pytest.raises(UnsupportedModel, match="abacus"):
        open_source(str(tmp_path / "copy")).config()


def test_encoder_without_a_language_model_is_refused() -> None:
    from transformers import CLIPConfig

    with pytest.raises(UnsupportedModel, match="clip"):
        build_empty(CLIPConfig())


def test_quantized_folder_is_refused(model_folder, tmp_path) -> None:
    shutil.copytree(model_folder, tmp_path / "copy")
    config = json.loads((tmp_path / "copy/config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "copy/config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantized"):
        open_source(str(tmp_path / "copy")).config()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, BadModel, "no such file or folder"),
        ({}, BadModel, "no config.json"),
        ({"config.json": "{}"}, UnsupportedModel, "no model.safetensors"),
        (
            {"config.json": "{}", "pytorch_model.bin": ""},
            UnsupportedModel,
            "only pytorch_model.bin",
        ),
        ("not a model", UnsupportedModel, "not a GGUF file"),
        ("", UnsupportedModel, "not a GGUF file"),
    ],
)
def test_what_is_no_model_is_refused(content, error, message, tmp_path) -> None:
    path = tmp_path / "model"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.mkdir()
        for name, text in content.items():
            (path / name).write_text(text)
    with pytest.raises(error, match=message):
        open_source(str(path))


def test_packaged_name_without_its_package_says_how_to_install_it() -> None:
    packaged = {"nothing": ("package_that_is_not_there", "model.gguf", "pip install it")}
    with pytest.raises(MissingPackage, match="pip install it"):
        resolve("nothing", packaged)


def test_path_of_the_same_name_wins_over_a_packaged_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").write_text("here")
    packaged = {"nothing": ("package_that_is_not_there", "model.gguf", "pip install it")}
    assert resolve("nothing", packaged) == Path("nothing")
