# SPDX-License-Identifier: Apache-2.0
"""Models to safetensors files and back, a part of a tensor at a time."""

from __future__ import annotations

from pagert.files.load import load_into
from pagert.files.save import save

__all__ = ["load_into", "save"]
