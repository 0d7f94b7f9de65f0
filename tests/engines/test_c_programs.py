# SPDX-License-Identifier: Apache-2.0
"""The C programs that put parts under faults, load and comparison; `make sanitize` has them too."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("program", "library", "arguments"),
    [
        ("flash_faults", "libflash", ["1", "5"]),
        ("copy_stress", "libcopy", ["1", "3"]),
        ("crc32c_ways", "libflash", []),
        ("frame_runs", "libcore", ["1", "20"]),
    ],
)
def test_program_passes(tmp_path, program, library, arguments):
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler: {compiler[0]}")
    # Not _GNU_SOURCE for the program itself: it says so where it needs to.
    objects = []
    for source in sorted((ROOT / "pagert" / "_core" / library).glob("*.c")):
        objects.append(str(tmp_path / f"{source.stem}.o"))
        flags = ["-std=c11", "-O1", "-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64", "-pthread", "-c"]
        command = [*compiler, *flags, f"-I{ROOT / 'include'}", str(source), "-o", objects[-1]]
        subprocess.run(command, check=True)
    binary = tmp_path / program
    source = ROOT / "tests" / "c" / f"{program}.c"
    flags = ["-std=c11", "-O1", "-D_FILE_OFFSET_BITS=64", "-pthread", f"-I{ROOT / 'include'}"]
    subprocess.run([*compiler, *flags, str(source), *objects, "-o", str(binary)], check=True)
    if program == "flash_faults":
        arguments = [*arguments, str(tmp_path)]
    done = subprocess.run([str(binary), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout
