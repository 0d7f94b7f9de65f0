# SPDX-License-Identifier: Apache-2.0
"""The whole command, on tiny models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagert.cli import main

pytest.importorskip("transformers", reason="the extra 'demo' is not installed")


@pytest.fixture
def words(model_folder: Path, text_file: Path) -> list[str]:
    """The options of a job that takes a second, unpaged."""
    return [
        "finetune",
        f"--model={model_folder}",
        f"--text={text_file}",
        "--device=cpu",
        "--steps=3",
        "--batch=2",
        "--seq=16",
        "--lr=1e-2",
        "--eval-batches=2",
    ]


@pytest.fixture
def paging(tmp_path: Path) -> list[str]:
    """Options of a pager far smaller than the training state."""
    return ["--device-bytes=1MiB", f"--flash-path={tmp_path}", "--flash-bytes=64MiB"]


def run_json(words: list[str], path: Path) -> dict:
    assert main([*words, f"--json={path}"]) == 0
    return json.loads(path.read_text())


def reference_losses(folder: Path, text: Path, accumulate: int = 1) -> list[float]:
    """Train in a loop of this test's own, with transformers' own loss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])
    train_tokens = len(ids) - int(len(ids) * 0.05)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        batch_losses = []
        for _ in range(accumulate):
            starts = torch.randint(0, train_tokens - 16, (2,), generator=generator)
            windows = torch.stack([ids[start : start + 17] for start in starts])
            loss = model(input_ids=windows, labels=windows).loss
            (loss / accumulate).backward()
            batch_losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(batch_losses) / accumulate)
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_are_those_of_an_independent_loop(
    accumulate, words, tmp_path, model_folder, text_file
) -> None:
    words += ["--unpaged", f"--accumulate={accumulate}"]
    report = run_json(words, tmp_path / "report.json")
    losses = [step["loss"] for step in report["steps"]]
    expected = reference_losses(model_folder, text_file, accumulate)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert [step["tokens"] for step in report["steps"]] == [32 * accumulate] * 3


def test_training_lowers_the_held_out_loss(words, tmp_path) -> None:
    words += ["--unpaged", "--steps=12"]
    report = run_json(words, tmp_path / "report.json")
    assert report["held_out_after"] < report["held_out_before"]
    assert report["ended"] == "finished"


def test_same_job_twice_gives_the_same_bits(words, tmp_path) -> None:
    first = run_json([*words, "--unpaged"], tmp_path / "first.json")
    second = run_json([*words, "--unpaged"], tmp_path / "second.json")
    assert first["weights"] == second["weights"]
    assert first["losses_bits"] == second["losses_bits"]


def test_another_seed_gives_other_bits(words, tmp_path) -> None:
    first = run_json([*words, "--unpaged"], tmp_path / "first.json")
    second = run_json([*words, "--unpaged", "--seed=1"], tmp_path / "second.json")
    assert first["weights"] != second["weights"]


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_every_optimizer_changes_every_weight(optimizer, words, tmp_path) -> None:
    before = run_json([*words, "--unpaged", "--lr=0"], tmp_path / "before.json")["weights"]
    words += ["--unpaged", f"--optimizer={optimizer}"]
    after = run_json(words, tmp_path / "after.json")["weights"]
    assert [name for name in before if before[name] == after[name]] == []


def test_saved_model_has_the_weights_of_the_report(words, tmp_path) -> None:
    import hashlib

    from transformers import AutoModelForCausalLM, AutoTokenizer

    words += ["--unpaged", f"--out={tmp_path / 'tuned'}"]
    report = run_json(words, tmp_path / "report.json")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(tmp_path / "tuned")
    for name, digest in report["weights"].items():
        tensor = model.state_dict()[name]
        content = f"{tuple(tensor.shape)} {tensor.dtype}".encode() + tensor.numpy().tobytes()
        assert hashlib.blake2b(content, digest_size=16).hexdigest() == digest, name


def test_paged_run_compares_equal_to_the_unpaged_one(words, paging, tmp_path, capfd) -> None:
    report = run_json([*words, *paging, "--compare"], tmp_path / "report.json")
    output = capfd.readouterr().out
    assert output.rstrip().endswith("bitwise equal: yes")
    assert report["comparison"]["bitwise_equal"] is True
    assert report["comparison"]["compared_losses"] == 5
    assert report["comparison"]["compared_weights"] == len(report["weights"]) == 20
    for tier in ("device", "flash"):
        assert 0 < report["stats"][tier]["peak_bytes"] <= report["stats"][tier]["capacity_bytes"]
    assert report["stats"]["flash_written_bytes"] > 0
    assert report["stats"]["activation_stored_bytes"] > 0
    assert "went to pages" in output


def test_activations_stay_plain_where_asked(words, paging, tmp_path) -> None:
    report = run_json([*words, *paging, "--steps=1", "--plain-activations"], tmp_path / "report.json")
    assert report["stats"]["activation_stored_bytes"] == 0


@pytest.mark.parametrize("option", ["--accumulate=2", "--step-after-backward"])
def test_paged_run_compares_equal_with(option, words, paging, tmp_path, capfd) -> None:
    report = run_json([*words, *paging, option, "--compare"], tmp_path / "report.json")
    assert report["comparison"]["bitwise_equal"] is True


def test_weights_are_updated_in_the_backward_pass_unless_told_otherwise(words, paging, monkeypatch) -> None:
    import pagert

    asked = []
    stepped = pagert.Pager.step_in_backward

    def step_in_backward(pager, optimizer, **options):
        asked.append(options)
        return stepped(pager, optimizer, **options)

    monkeypatch.setattr(pagert.Pager, "step_in_backward", step_in_backward)
    assert main([*words, *paging, "--accumulate=3"]) == 0
    assert main([*words, *paging, "--step-after-backward"]) == 0
    assert asked == [{"accumulate": 3}]


def test_paged_run_saves_what_it_trained(words, paging, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    unpaged = [*words, "--unpaged", f"--out={tmp_path / 'unpaged'}"]
    run_json(unpaged, tmp_path / "unpaged.json")
    run_json([*words, *paging, f"--out={tmp_path / 'paged'}"], tmp_path / "paged.json")
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("unpaged", "paged")
    )
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


def bad_inputs():
    yield "--model=/nowhere/model", "BadModel", "no such file or folder"
    yield "--text=/nowhere/text", "BadText", "no such file"
    yield "--seq=65", "SequenceTooLong", "the model has 64 positions"
    yield "--text-limit=12 parsecs", "ConfigurationError", "'12 parsecs'"
    yield "--text-limit=20B", "TextTooShort", "--seq 16 needs 34"
    yield "--out=/proc/self", "OutputExists", "not an empty folder"
    yield "--json=/nowhere/report.json", "FileNotFoundError", "does not exist"
    yield "--device=abacus", "ConfigurationError", "not usable here"
    yield "--compare", "ConfigurationError", "leave --unpaged out"


@pytest.mark.parametrize(("option", "error", "message"), list(bad_inputs()))
def test_bad_input_is_one_line_and_status_2(option, error, message, words, capsys) -> None:
    assert main([*words, "--unpaged", option]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"pagert finetune: {error}: ")
    assert message in captured.err
    assert "Traceback" not in captured.out + captured.err


@pytest.mark.parametrize("option", ["--device-bytes=12 parsecs", "--device-bytes=0"])
def test_bad_budget_is_one_line_and_status_2(option, words, paging, capsys) -> None:
    assert main([*words, *paging, option]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "Error: " in captured.err


def test_device_smaller_than_one_operator_is_one_line_and_status_2(words, paging, capsys) -> None:
    assert main([*words, *paging, "--device-bytes=64KiB"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("pagert finetune: OutOfFrames: ")


def test_folder_without_tokenizer_is_one_line_and_status_2(
    words, model_folder, tmp_path, capsys
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_folder / name, tmp_path)
    assert main([*words, "--unpaged", f"--model={tmp_path}"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "BadModel" in captured.err and "no usable tokenizer" in captured.err


@pytest.mark.parametrize("option", ["--steps=0", "--batch=-1", "--lr=nan", "--optimizer=magic"])
def test_bad_number_is_refused_by_name(option, words, capsys) -> None:
    with pytest.raises(SystemExit) as exit_information:
        main([*words, option])
    assert exit_information.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err


def start(words: list[str], **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "pagert", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("kind", ["unpaged", "paged"])
def test_interrupt_ends_with_the_report_so_far(kind, words, paging, tmp_path) -> None:
    path = tmp_path / "report.json"
    words += ["--steps=100000", f"--json={path}", f"--out={tmp_path / 'out'}"]
    with start([*words, *(["--unpaged"] if kind == "unpaged" else paging)]) as process:
        for line in process.stdout:
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGINT)
                break
        output = process.stdout.read()
    assert process.returncode == 130
    assert "run interrupted" in output and "held-out loss" in output and "peak RSS" in output
    report = json.loads(path.read_text())
    assert report["ended"] == "interrupted" and len(report["steps"]) >= 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.json"]


def test_live_view_shows_the_tiers_on_a_terminal(words, paging) -> None:
    # A pseudo-terminal, wide enough for every column.
    controller, terminal = os.openpty()
    environment = os.environ | {"COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
    command = [sys.executable, "-m", "pagert", *words, *paging]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        output = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            output += part
    os.close(controller)
    text = output.decode()
    assert process.returncode == 0, text
    for word in ("step", "device", "flash", "moved", "paged run finished", "tokens/s"):
        assert word in text
