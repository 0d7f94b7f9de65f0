# SPDX-License-Identifier: Apache-2.0
"""What people get who install pagert: a wheel, installed where nothing else of pagert is."""

import os
import pathlib
import shutil
import site
import subprocess
import sys
import sysconfig
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*command, **options):
    """Run a command; its output if it succeeds, and shown with the failure if not."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def environment():
    """This process's environment with the build tools of this Python first on the PATH."""
    scripts = sysconfig.get_path("scripts")
    return {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if shutil.which("meson", path=environment()["PATH"]) is None:
        pytest.skip("building a wheel needs meson, which is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        *("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder),
        *(f"--config-settings=build-dir={folder / 'build'}", ROOT),
        env=environment(),
    )
    (built,) = folder.glob("pagert-*.whl")
    return built


@pytest.fixture(scope="module")
def clean_python(wheel, tmp_path_factory):
    """A Python that has the wheel and its dependencies, and knows nothing of the source tree."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    # The dependencies are this Python's. Of a folder that a .pth file adds no .pth file is read: so
    # an editable pagert stays out.
    packages = pathlib.Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    folders = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join([*folders, *site.getsitepackages()]))
    return python


@pytest.fixture
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_carries_every_public_header(names):
    headers = {f"pagert/include/pagert/{path.name}" for path in ROOT.glob("include/pagert/*.h")}
    assert headers
    assert headers <= names


def test_wheel_carries_every_python_source_and_the_typing_marker(names):
    sources = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("pagert/**/*.py") if path.is_file()
    }
    assert "pagert/__init__.py" in sources
    assert sources | {"pagert/py.typed"} <= names


def test_wheel_carries_a_stub_for_every_compiled_module(names):
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    assert compiled
    assert {f"{module}.pyi" for module in compiled} <= names


def test_wheel_carries_the_licence_and_no_left_overs(names):
    assert any(name.endswith("/LICENSE") for name in names)
    strays = [name for name in names if name.endswith((".pyc", ".c", ".o", ".a", "meson.build"))]
    assert strays == []


def test_installed_package_finds_its_headers_and_a_compiler_can_use_them(clean_python, tmp_path):
    include = run(
        clean_python, "-c", "import pagert; print(pagert.get_include())", cwd=tmp_path
    ).strip()
    assert not pathlib.Path(include).is_relative_to(ROOT)
    program = tmp_path / "program.c"
    headers = sorted(path.name for path in ROOT.glob("include/pagert/*.h"))
    program.write_text(
        "".join(f'#include "pagert/{name}"\n' for name in headers)
        + "int main(void) { return 0; }\n"
    )
    compiler = os.environ.get("CC", "cc")
    run(
        compiler,
        "-std=c11",
        "-Wall",
        "-Werror",
        f"-I{include}",
        program,
        "-o",
        tmp_path / "program",
    )


def test_installed_package_imports_every_compiled_module(clean_python, names, tmp_path):
    modules = sorted(
        name.partition(".")[0].replace("/", ".") for name in names if name.endswith(".so")
    )
    code = (
        "import importlib, sys; [print(importlib.import_module(m).__file__) for m in sys.argv[1:]]"
    )
    files = run(clean_python, "-c", code, *modules, cwd=tmp_path).split()
    assert len(files) == len(modules)
    assert not any(pathlib.Path(file).is_relative_to(ROOT) for file in files)


@pytest.mark.parametrize("command", [("-m", "pagert"), ()])
def test_installed_package_has_its_command(clean_python, tmp_path, command):
    program = clean_python if command else clean_python.with_name("pagert")
    assert "finetune" in run(program, *command, "--help", cwd=tmp_path)


def test_import_refuses_other_systems_by_name(tmp_path):
    code = "import sys; sys.platform = 'darwin'; import pagert"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "ImportError: pagert runs on Linux only" in done.stderr
    assert "darwin" in done.stderr


def test_build_refuses_other_systems_by_name(tmp_path):
    if shutil.which("meson", path=environment()["PATH"]) is None:
        pytest.skip("configuring a build needs meson, which is not installed")
    cross_file = tmp_path / "other-system.ini"
    cross_file.write_text(
        "[binaries]\nc = 'cc'\ncython = 'cython'\n"
        "[host_machine]\nsystem = 'darwin'\nendian = 'little'\n"
        "cpu_family = 'x86_64'\ncpu = 'x86_64'\n"
    )
    done = subprocess.run(
        ["meson", "setup", "--cross-file", str(cross_file), str(tmp_path / "build"), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert done.returncode != 0
    assert "pagert runs on Linux only" in done.stdout + done.stderr
