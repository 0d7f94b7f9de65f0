# SPDX-License-Identifier: Apache-2.0
"""The C program that puts the pump under several threads and bad engines; `make sanitize` has it too."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_pump_survives_several_threads_and_engines_that_are_late_refuse_and_fail(tmp_path):
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler: {compiler[0]}")
    core = ROOT / "pagert" / "_core"
    sources = [ROOT / "tests" / "c" / "pump_stress.c", *(core / "libpump").glob("*.c"),
               *(core / "libcore").glob("*.c")]  # fmt: skip
    program = tmp_path / "pump_stress"
    flags = ["-std=c11", "-O1", "-D_GNU_SOURCE", "-pthread", f"-I{ROOT / 'include'}"]
    subprocess.run([*compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    seed = str(int(time.time()))
    print(f"seed {seed}")
    done = subprocess.run([str(program), seed, "10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
