# SPDX-License-Identifier: Apache-2.0
"""How every source file begins, how long it is, and which words it does not use."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("pagert", "include", "tests", "bench", "docs")
CODE = {".py", ".pyi", ".pyx", ".pxd", ".c", ".h"}
LINES_MAX = 600
SPDX = "SPDX-License-Identifier: Apache-2.0"

# Each says nothing about what a thing is. The design's table has the words to use instead.
WORDS = {"chunk", "blob", "slot", "swapper", "manager", "helper", "util"}
WORDS |= {f"{word}s" for word in WORDS}
# Names that Python and other libraries chose.
NAMES = {"__slots__"}


def sources() -> list[pathlib.Path]:
    found = [ROOT / "meson.build"]
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in CODE or path.name == "meson.build":
                found.append(path)
    return sorted(path for path in found if "__pycache__" not in path.parts)


every_source = pytest.mark.parametrize(
    "path", sources(), ids=lambda path: str(path.relative_to(ROOT))
)


@every_source
def test_first_line_names_the_license(path: pathlib.Path) -> None:
    lines = path.read_text().splitlines()
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    assert SPDX in first


@every_source
def test_file_is_short(path: pathlib.Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES_MAX


def forbidden(name: str) -> bool:
    if name in NAMES or name.endswith("ContextManager"):
        return False
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return any(part.lower() in WORDS for part in parts)


def defined_in_python(text: str) -> Iterator[str]:
    """Names that a module gives to things; those it uses of others are theirs."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def identifiers_of_c(text: str) -> Iterator[str]:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    text = re.sub(r"(?m)^\s*#\s*include.*$", "", text)
    yield from re.findall(r"[A-Za-z_]\w*", text)


def identifiers_of_cython(text: str) -> Iterator[str]:
    text = re.sub(r'("""|\'\'\').*?\1', '""', text, flags=re.DOTALL)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', '""', text)
    yield from re.findall(r"[A-Za-z_]\w*", re.sub(r"#[^\n]*", "", text))


READERS = {
    ".py": defined_in_python,
    ".pyi": defined_in_python,
    ".pyx": identifiers_of_cython,
    ".pxd": identifiers_of_cython,
    ".c": identifiers_of_c,
    ".h": identifiers_of_c,
}


@every_source
def test_names_say_what_things_are(path: pathlib.Path) -> None:
    assert not forbidden(path.stem), "the file's name"
    if reader := READERS.get(path.suffix):
        found = {name for name in reader(path.read_text()) if forbidden(name)}
        assert not found


def test_the_word_test_knows_names_from_words() -> None:
    for name in ("free_slots", "BlobStore", "util", "page_chunk", "SwapManager", "helpers"):
        assert forbidden(name), name
    for name in ("__slots__", "contextmanager", "AbstractContextManager", "utility", "utilisation"):
        assert not forbidden(name), name
