# SPDX-License-Identifier: Apache-2.0
"""Programs of their own around one core: those that may abort, and those whose memory is counted."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from pagert._core import core

# The extension alone: the whole package takes seconds to import, and memory.
_PROLOGUE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("pagert._core.core", {core.__file__!r})
c = importlib.util.module_from_spec(spec)
spec.loader.exec_module(c)
"""


def run_apart(program: str) -> subprocess.CompletedProcess[str]:
    """Run `program`, to which the core's module is `c`."""
    text = _PROLOGUE + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
