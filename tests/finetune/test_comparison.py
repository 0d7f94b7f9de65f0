# SPDX-License-Identifier: Apache-2.0
"""The verdict on a paged and an unpaged run."""

from __future__ import annotations

import json
import math
import subprocess

import pytest
import torch

from pagert.cli import main
from pagert.finetune import job as job_module
from pagert.finetune.comparison import command_line, compare_reports, comparison_lines
from pagert.finetune.report import Report, StepReport
from pagert.finetune.settings import Settings
from pagert.finetune.view import View
from pagert.finetune.weights import digests

pytest.importorskip("transformers", reason="the extra 'demo' is not installed")


def report_of(losses: list[float], weights: dict[str, str], *, paged: bool) -> dict:
    report = Report(paged=paged, planned_steps=len(losses), weights=weights, peak_rss_bytes=100)
    report.steps = [StepReport(loss=loss, seconds=2.0, tokens=10) for loss in losses]
    report.held_out_before, report.held_out_after = 3.0, 2.0
    return json.loads(report.as_json({}))


def verdict(first: dict, second: dict) -> str:
    return list(comparison_lines(compare_reports(first, second)))[-1]


def flip_bit(tensor: torch.Tensor, bit: int) -> None:
    with torch.no_grad():
        words = tensor.view(torch.int32).flatten()
        words[words.numel() // 2] ^= 1 << bit


def test_equal_runs_are_equal(random_model) -> None:
    weights = digests(random_model())
    first = report_of([1.5, 1.25], weights, paged=True)
    assert (
        verdict(first, report_of([1.5, 1.25], dict(weights), paged=False)) == "bitwise equal: yes"
    )


@pytest.mark.parametrize("bit", [0, 15, 31])
def test_one_bit_of_one_weight_makes_the_verdict_no(bit, random_model) -> None:
    model = random_model()
    before = digests(model)
    flip_bit(model.model.layers[1].mlp.down_proj.weight, bit)
    comparison = compare_reports(
        report_of([1.5], before, paged=True), report_of([1.5], digests(model), paged=False)
    )
    assert comparison["different_weights"] == ["model.layers.1.mlp.down_proj.weight"]
    assert list(comparison_lines(comparison))[-1] == "bitwise equal: no"


def test_negative_zero_is_not_zero(random_model) -> None:
    model = random_model()
    with torch.no_grad():
        model.model.norm.weight[0] = 0.0
        before = digests(model)
        model.model.norm.weight[0] = -0.0
    assert before != digests(model)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1.5, math.nan], [1.5, math.nan], "yes"),
        ([1.5, math.nextafter(1.25, 2.0)], [1.5, 1.25], "no"),
        ([1.5, 0.0], [1.5, -0.0], "no"),
        ([1.5, 1.25], [1.5], "no"),
    ],
)
def test_every_loss_counts(left, right, expected) -> None:
    first, second = report_of(left, {}, paged=True), report_of(right, {}, paged=False)
    assert verdict(first, second) == f"bitwise equal: {expected}"


def test_missing_weight_makes_the_verdict_no() -> None:
    first = report_of([1.5], {"a": "00", "b": "11"}, paged=True)
    assert verdict(first, report_of([1.5], {"a": "00"}, paged=False)) == "bitwise equal: no"


def test_settings_survive_the_command_line() -> None:
    import argparse

    from pagert.cli.finetune import add_arguments

    settings = Settings(
        model="a model", text="-x", steps=7, lr=3e-7, device_bytes="1MiB", compare=True, seed=-4
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert Settings(**vars(parser.parse_args(command_line(settings)))) == settings


@pytest.mark.parametrize(
    ("ending", "message"), [("exit 2", "exit status 2"), ("kill -9 $$", "SIGKILL"), ("true", "")]
)
def test_unpaged_run_without_a_report_leaves_the_verdict_open(
    ending, message, monkeypatch, capfd
) -> None:
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command: real(["sh", "-c", ending]))
    with View("test", 1, plain=True) as view:
        status = job_module._compare(Settings(model="m", text="t"), Report(paged=True), view)
    output = capfd.readouterr().out
    assert status == job_module.EXIT_DIFFERENT
    assert message in output and output.rstrip().endswith("bitwise equal: unknown")


def test_help_names_the_options(capsys) -> None:
    with pytest.raises(SystemExit) as exit_information:
        main(["finetune", "--help"])
    assert exit_information.value.code == 0
    assert "--device-bytes" in capsys.readouterr().out
