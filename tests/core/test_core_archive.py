# SPDX-License-Identifier: Apache-2.0
"""libcore depends on nothing: no I/O, no allocation, no clock, no threads, no globals.

The archives that lie in build folders are looked at, and one that the test makes from the sources,
so that the claim is checked where pagert was installed from a wheel as well.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "pagert" / "_core" / "libcore"
HEADERS = ROOT / "include"

ALLOWED = {"memcpy", "memmove", "memset", "memcmp", "abort"}
# What compilers and linkers bring along by themselves: stack protector, sanitizers' and position-
# independent code's own names.
COMPILER = {"__stack_chk_fail", "_GLOBAL_OFFSET_TABLE_"}
SANITIZERS = ("__asan_", "__ubsan_")

compiler = os.environ.get("CC", "cc").split()
needs_compiler = pytest.mark.skipif(
    shutil.which(compiler[0]) is None or shutil.which("nm") is None,
    reason="no C compiler or no nm on this machine",
)


def symbols(archive: pathlib.Path, *options: str) -> set[tuple[str, str]]:
    """(kind, name) of the archive's symbols."""
    listing = subprocess.run(
        ["nm", "-P", *options, archive], capture_output=True, text=True, check=True
    ).stdout
    fields = (line.split() for line in listing.splitlines())
    return {(words[1], words[0]) for words in fields if len(words) >= 2}


def visible(archive: pathlib.Path) -> set[str]:
    """Names that a shared library made of the archive would export."""
    listing = subprocess.run(
        ["readelf", "--syms", "--wide", archive], capture_output=True, text=True, check=True
    ).stdout
    fields = (line.split() for line in listing.splitlines())
    return {
        words[7]
        for words in fields
        if len(words) == 8 and words[4:6] == ["GLOBAL", "DEFAULT"] and words[6] != "UND"
    }


def writable_bytes(archive: pathlib.Path) -> int:
    """Bytes of globals. Constant tables of addresses (.data.rel.ro) are not among them."""
    listing = subprocess.run(
        ["size", "-A", archive], capture_output=True, text=True, check=True
    ).stdout
    fields = [line.split() for line in listing.splitlines()]
    return sum(int(words[1]) for words in fields if words and words[0] in (".data", ".bss"))


def check_archive(archive: pathlib.Path) -> None:
    everything = symbols(archive)
    defined = {name for kind, name in everything if kind not in "Uw"}
    undefined = {name for kind, name in everything if kind in "Uw"} - defined
    foreign = {name for name in undefined - ALLOWED - COMPILER if not name.startswith(SANITIZERS)}
    assert not foreign, f"{archive} needs {sorted(foreign)}"
    strangers = {name for name in visible(archive) if not name.startswith(("pagert_", "__asan"))}
    assert not strangers, f"{archive} exports {sorted(strangers)}"


def compile_archive(folder: pathlib.Path, *options: str) -> pathlib.Path:
    sources = sorted(SOURCES.glob("*.c"))
    assert sources
    objects = []
    for source in sources:
        target = folder / f"{source.stem}.o"
        command = [*compiler, "-std=c11", "-fPIC", "-fvisibility=hidden", *options, "-I", HEADERS]
        subprocess.run([*command, "-c", source, "-o", target], check=True)
        objects.append(target)
    archive = folder / "libcore.a"
    subprocess.run(["ar", "rcs", archive, *objects], check=True)
    return archive


@needs_compiler
@pytest.mark.parametrize("options", [["-O0"], ["-O2", "-fstack-protector-strong"]], ids=" ".join)
def test_libcore_needs_nothing_but_memory_functions_and_abort(
    options: list[str], tmp_path: pathlib.Path
) -> None:
    archive = compile_archive(tmp_path, *options)
    check_archive(archive)
    assert writable_bytes(archive) == 0


@needs_compiler
def test_built_archives_need_nothing_else() -> None:
    folders = [ROOT / "build", ROOT / ".venv" / "package"]
    if given := os.environ.get("PAGERT_BUILD_DIR"):
        folders.append(pathlib.Path(given))
    archives = [archive for folder in folders for archive in folder.rglob("libcore.a")]
    if not archives:
        pytest.skip("no build folder here; PAGERT_BUILD_DIR can name one")
    for archive in archives:
        check_archive(archive)


@needs_compiler
@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize("header", sorted((HEADERS / "pagert").glob("*.h")), ids=lambda p: p.name)
def test_public_headers_stand_alone(
    header: pathlib.Path, language: str, tmp_path: pathlib.Path
) -> None:
    if language == "c++" and shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this machine")
    program = tmp_path / f"include.{'c' if language == 'c' else 'cpp'}"
    program.write_text(f'#include "pagert/{header.name}"\n#include "pagert/{header.name}"\n')
    command = compiler if language == "c" else ["c++"]
    subprocess.run(
        [*command, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", HEADERS, program],
        check=True,
    )
