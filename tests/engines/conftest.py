# SPDX-License-Identifier: Apache-2.0
"""Made file systems, aligned memory, and processes under a system-call filter."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import pagert._core.flash

# The start of scripts that run in a process of their own. The engines come without the rest of the
# package, whose import takes seconds. deny() is a filter of system calls: one of them fails with an
# errno from then on, always or only where an argument has all bits of a mask.
_PRELUDE = """
import ctypes, errno, importlib.util, os, struct, sys

spec = importlib.util.spec_from_file_location("pagert._core.flash", sys.argv.pop(1))
engines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engines)
FlashFile, CopyEngine = engines.FlashFile, engines.CopyEngine

def deny(number, code, argument=None, mask=0):
    libc = ctypes.CDLL(None, use_errno=True)
    def op(kind, k, jt=0, jf=0):
        return struct.pack("HBBI", kind, jt, jf, k)
    LOAD, EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06
    refuse, allow = 0x00050000 | code, 0x7FFF0000
    if argument is None:
        program = [op(LOAD, 0), op(EQUAL, number, 0, 1), op(RETURN, refuse), op(RETURN, allow)]
    else:
        program = [op(LOAD, 0), op(EQUAL, number, 0, 4), op(LOAD, 16 + 8 * argument),
                   op(AND, mask), op(EQUAL, mask, 0, 1), op(RETURN, refuse), op(RETURN, allow)]
    code_bytes = ctypes.create_string_buffer(b"".join(program))
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    wanted = Program(len(program), ctypes.addressof(code_bytes))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, ctypes.byref(wanted), 0, 0) != 0:  # PR_SET_SECCOMP, filter
        print("SKIP: seccomp filters are not allowed here:", errno.errorcode[ctypes.get_errno()])
        raise SystemExit(77)
"""


@pytest.fixture
def run_script() -> Callable[..., str]:
    """Run Python source in a process of its own; its standard output. Exit code 77 skips."""

    def run(source: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _PRELUDE + source, pagert._core.flash.__file__, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode == 77:
            pytest.skip(done.stdout.strip())
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def aligned() -> Callable[[int], memoryview]:
    """Make page-aligned writable memory of a size."""
    return lambda size_bytes: memoryview(mmap.mmap(-1, size_bytes))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a file system and return its folder, or skip: mounted("tmpfs", "-o", "size=8m").

    With `image_bytes` the source is a file of that size, made with `mkfs`.
    """
    with ExitStack() as stack:

        def mount(kind: str, *options: str, image_bytes: int = 0) -> Path:
            if os.geteuid():
                pytest.skip("mounting needs root")
            folder = tmp_path / f"mount-{len(os.listdir(tmp_path))}"
            folder.mkdir()
            source = kind
            if image_bytes:
                source = str(tmp_path / f"image-{len(os.listdir(tmp_path))}")
                with open(source, "wb") as image:
                    image.truncate(image_bytes)
                maker = shutil.which(f"mkfs.{kind}")
                if maker is None:
                    pytest.skip(f"mkfs.{kind} is not installed")
                subprocess.run([maker, "-q", "-F", source], check=True)
            done = subprocess.run(
                ["mount", "-t", kind, *options, source, str(folder)], capture_output=True, text=True
            )
            if done.returncode:
                pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            return folder

        yield mount
