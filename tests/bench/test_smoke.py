# SPDX-License-Identifier: Apache-2.0
import json
import math
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(path.name for path in BENCH.glob("*.py") if not path.name.startswith("_"))


def run(folder, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_runs_at_its_smoke_size(script, tmp_path):
    assert run(tmp_path, BENCH / script, "--smoke").strip()


def test_operator_calls_are_written_with_a_time_of_each_kind(tmp_path):
    printed = run(tmp_path, BENCH / "operator_call.py", "--smoke", "--json", "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = {**figures["operators"], "training step": figures["training_step"]}
    assert {"view", "fused AdamW, 64", "training step"} < set(rows)
    for name, row in rows.items():
        assert name in printed
        assert all(row[kind]["median"] > 0 for kind in ("plain", "wrapper", "paged"))
        assert math.isclose(row["ratio"], row["paged"]["median"] / row["wrapper"]["median"])
    assert 0 < rows["training step"]["paged_operators"] < rows["training step"]["operators"]


def test_operator_calls_run_under_pytest_benchmark(tmp_path):
    pytest.importorskip("pytest_benchmark", reason="pytest-benchmark comes with the bench extra")
    printed = run(
        tmp_path, "-m", "pytest", BENCH / "_pytest_operators.py", "-q", "--benchmark-disable"
    )
    assert " passed" in printed and " failed" not in printed
