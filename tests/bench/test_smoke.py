# SPDX-License-Identifier: Apache-2.0
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(path.name for path in BENCH.glob("*.py") if not path.name.startswith("_"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_runs_at_its_smoke_size(script, tmp_path):
    done = subprocess.run(
        [sys.executable, BENCH / script, "--smoke"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip()
