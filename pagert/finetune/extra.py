# SPDX-License-Identifier: Apache-2.0
"""Packages of the `demo` extra, imported when they are first needed."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from pagert.finetune.errors import MissingPackage

__all__ = ["load"]


def load(name: str) -> ModuleType:
    """Import a package of the `demo` extra.

    Raises
    ------
    MissingPackage
        Where it, or something that it needs, is not installed.
    """
    # Models come from files that are already here; a look-up on the network could only fail late.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(
            f"fine-tuning needs the package {error.name or name}, which is not installed; run: "
            "pip install 'pagert[demo]'"
        ) from error
