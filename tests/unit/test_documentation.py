# SPDX-License-Identifier: Apache-2.0
import doctest
import importlib
import pkgutil

import pytest

import pagert

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
