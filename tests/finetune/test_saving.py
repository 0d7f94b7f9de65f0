# SPDX-License-Identifier: Apache-2.0
"""Saved models load with plain transformers, to the bit, and are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from pagert.finetune.errors import OutputExists
from pagert.finetune.saving import check_target, save_model

pytest.importorskip("transformers", reason="the extra 'demo' is not installed")


def load(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_model_loads_with_plain_transformers_to_the_bit(
    tied, tmp_path, tokenizer, random_model
) -> None:
    model = random_model(tie_word_embeddings=tied)
    with torch.no_grad():
        model.model.norm.weight[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    save_model(model, tokenizer, tmp_path / "out")
    loaded, loaded_tokenizer = load(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        other = loaded.state_dict()[name]
        assert other.dtype == torch.float32
        assert torch.equal(other.view(torch.int32), tensor.view(torch.int32)), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded_tokenizer("the king")["input_ids"] == tokenizer("the king")["input_ids"]


def test_tied_tensor_is_stored_once(tmp_path, tokenizer, random_model) -> None:
    from safetensors import safe_open

    model = random_model()
    save_model(model, tokenizer, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as stored:
        assert set(stored.keys()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_interrupted_save_leaves_nothing(
    error, tmp_path, tokenizer, monkeypatch, random_model
) -> None:
    real, calls = os.pwrite, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise error
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(type(error)):
        save_model(random_model(), tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_target_is_not_there_before_it_is_whole(
    tmp_path, tokenizer, monkeypatch, random_model
) -> None:
    real, seen = os.pwrite, []

    def watching(*arguments):
        seen.append((tmp_path / "out").exists())
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", watching)
    save_model(random_model(), tokenizer, tmp_path / "out")
    assert seen and not any(seen)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folder_is_as_readable_as_any_new_one(tmp_path, tokenizer, random_model) -> None:
    save_model(random_model(), tokenizer, tmp_path / "out")
    (tmp_path / "other").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_empty_folder_is_accepted_as_target(tmp_path, tokenizer, random_model) -> None:
    (tmp_path / "out").mkdir()
    save_model(random_model(), tokenizer, tmp_path / "out")
    load(tmp_path / "out")


@pytest.mark.parametrize("kind", ["full", "file", "link"])
def test_target_that_exists_is_refused_and_left_alone(kind, tmp_path) -> None:
    target = tmp_path / "out"
    if kind == "full":
        target.mkdir()
        (target / "precious").write_text("data")
    elif kind == "file":
        target.write_text("data")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputExists, match="not an empty folder"):
        check_target(target)
    assert target.is_symlink() or target.exists()


def test_target_without_parent_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; create it"):
        check_target(tmp_path / "missing" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_target_in_a_folder_that_cannot_be_written_is_refused(tmp_path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="cannot be written to"):
        check_target(tmp_path / "out")


def test_too_little_space_is_told_with_both_figures(tmp_path) -> None:
    with pytest.raises(OSError, match=r"the model takes \d{18,} bytes, \d+ are free"):
        check_target(tmp_path / "out", weights_bytes=10**18)
