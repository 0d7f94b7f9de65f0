# SPDX-License-Identifier: Apache-2.0
import doctest
import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import pagert

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
MODULES = [
    "pagert",
    *(
        found.name
        for found in pkgutil.walk_packages(pagert.__path__, "pagert.", onerror=lambda name: None)
        if not found.name.endswith("__main__")
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "pagert").partition(".")[0] == "pagert":
            raise
        pytest.skip(f"needs {error.name}, which only an extra installs")
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("name", pagert.__all__)
def test_public_names_are_documented(name):
    documentation = getattr(pagert, name).__doc__
    assert documentation
    assert documentation.strip().splitlines()[0].endswith((".", ".)"))


def test_the_example_in_the_readme_runs(tmp_path):
    text = README.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 2: loss \d", done.stdout)


@pytest.mark.parametrize("document", ["README.md", "docs/design.md", "docs/files.md"])
def test_what_the_documents_point_to_exists(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / document).parent.joinpath(target).exists(), target
    if document == "docs/files.md":
        for cell in re.findall(r"^\| (.*?) \|", text, re.MULTILINE):
            for path in re.findall(r"`(.+?)`", cell):
                assert list(ROOT.glob(path)), path
