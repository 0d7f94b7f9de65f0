# SPDX-License-Identifier: Apache-2.0
"""Imports and includes go one way, down; nothing below knows what is above it."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "pagert"
CORE = PACKAGE / "_core"
HEADERS = ROOT / "include" / "pagert"

# Lowest first. A module may import from its own layer and from those below.
LAYERS = [
    {"errors", "sizes", "geometry", "compiling"},
    {"_core", "engines"},
    {"config", "stats"},
    {"runtime", "trace"},
    {"tensor", "simulation"},
    {"training"},
    {"files"},
    {"pager"},
    {"__init__"},
    {"cli", "finetune", "__main__"},
]
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# What each C library may include of the project, beside its own files.
LIBRARIES = {
    "libcore": {"core.h"},
    "libflash": {"engine.h", "flash.h", "worker.h"},
    "libcopy": {"engine.h", "copy.h", "worker.h"},
    "libpump": {"engine.h", "core.h", "pump.h", "worker.h"},
}
PUBLIC = {
    "core.h": set(),
    "engine.h": set(),
    "flash.h": {"engine.h"},
    "copy.h": {"engine.h"},
    "pump.h": {"engine.h", "core.h"},
}


def component(module: str) -> str:
    """`pagert.tensor.views` is of `tensor`; `pagert` itself is `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: pathlib.Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.is_dir() or any(base.with_suffix(end).exists() for end in (".py", ".pyx", ".pyi"))


def imported(module: str, path: pathlib.Path) -> set[str]:
    """Modules of the project that a source imports, in functions and for type checkers too."""
    found = set()
    if path.suffix in (".pyx", ".pxd"):
        text = path.read_text()
        for match in re.finditer(r"(?m)^\s*from\s+(pagert[\w.]*)\s+c?import\s+\(?([\w, ]+)", text):
            names = [name.split()[0] for name in match[2].split(",") if name.strip()]
            found |= {resolve(match[1], name) for name in names}
        found |= set(re.findall(r"(?m)^\s*c?import\s+(pagert[\w.]*)", text))
        return found
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    if path.stem == "__init__" and len(package) == 2 and package[1] == "__init__":
        package = package[:1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "pagert"}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            if base.split(".")[0] == "pagert":
                found |= {resolve(base, alias.name) for alias in node.names}
    return found


def resolve(base: str, name: str) -> str:
    """`from pagert import errors` imports a module, `from pagert import Pager` the package."""
    return f"{base}.{name}" if is_module(f"{base}.{name}") else base


SOURCES = sorted(
    path
    for end in ("py", "pyi", "pyx", "pxd")
    for path in PACKAGE.rglob(f"*.{end}")
    if "__pycache__" not in path.parts
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_imports_go_down(path: pathlib.Path) -> None:
    module = module_of(path)
    mine = component(module)
    assert mine in RANKS, f"{mine} has no layer yet; give it one in LAYERS"
    for other in imported(module, path):
        theirs = component(other)
        assert theirs in RANKS, f"{module} imports {other}, which has no layer"
        assert RANKS[theirs] <= RANKS[mine], f"{module} imports {other} from above"


def test_the_layer_test_sees_imports() -> None:
    assert "pagert.errors" in imported("pagert.__init__", PACKAGE / "__init__.py")


def includes(path: pathlib.Path) -> set[str]:
    return set(re.findall(r'(?m)^\s*#\s*include\s+["<]([^">]+)[">]', path.read_text()))


def of_the_project(names: set[str]) -> set[str]:
    """Names of the project's headers: public ones, and private ones of any library."""
    return {
        name.rsplit("/", 1)[-1]
        for name in names
        if name.startswith(("pagert/", "../", "lib")) or (CORE / name).exists()
    }


C_SOURCES = sorted(
    path for name in LIBRARIES for end in ("c", "h") for path in (CORE / name).rglob(f"*.{end}")
)


@pytest.mark.parametrize("path", C_SOURCES, ids=lambda path: str(path.relative_to(CORE)))
def test_c_includes_go_down(path: pathlib.Path) -> None:
    library = path.relative_to(CORE).parts[0]
    strangers = of_the_project(includes(path)) - LIBRARIES[library]
    assert not strangers, f"{library} must not know {sorted(strangers)}"


def test_every_c_library_has_its_place() -> None:
    folders = {path.name for path in CORE.glob("lib*") if path.is_dir()}
    assert folders <= LIBRARIES.keys()


@pytest.mark.parametrize("path", sorted(HEADERS.glob("*.h")), ids=lambda path: path.name)
def test_public_headers_include_only_what_lies_below(path: pathlib.Path) -> None:
    assert path.name in PUBLIC, "give the header its place in PUBLIC"
    assert of_the_project(includes(path)) <= PUBLIC[path.name]


def test_libcore_includes_no_system_header_that_does_something() -> None:
    harmless = {"stdint.h", "stddef.h", "stdbool.h", "stdalign.h", "limits.h", "string.h"}
    # abort() alone is taken from there; the test of the archive's symbols watches over the rest.
    harmless |= {"stdlib.h"}
    for path in (CORE / "libcore").glob("*.[ch]"):
        system = {name for name in includes(path) if not (path.parent / name).exists()}
        assert system - harmless <= {"pagert/core.h"}, path.name


def within(folder: str) -> dict[str, set[str]]:
    """What each module of a folder imports from its own folder, in functions and for type checkers too."""
    prefix = f"pagert.{folder}."
    graph = {}
    for path in (PACKAGE / folder).rglob("*.py"):
        module = module_of(path)
        if path != PACKAGE / folder / "__init__.py":  # which brings together what users see
            graph[module] = {name for name in imported(module, path) if name.startswith(prefix)}
    return graph


@pytest.mark.parametrize("folder", ["tensor", "training", "trace", "simulation", "finetune", "engines"])
def test_no_circle_of_imports_within_a_folder(folder: str) -> None:
    graph = within(folder)
    done: set[str] = set()
    while left := {module for module in graph if module not in done}:
        free = {module for module in left if graph[module] <= done}
        assert free, f"these import each other in a circle: {sorted(left)}"
        done |= free


def test_the_test_for_circles_sees_imports_of_a_folder() -> None:
    assert "pagert.tensor.copying" in within("tensor")["pagert.tensor.paged_tensor"]
