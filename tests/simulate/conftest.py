# SPDX-License-Identifier: Apache-2.0
"""The oracles beside the tests can be imported; failures of random tests say how to run them again."""

from __future__ import annotations

import pathlib
import sys

from hypothesis import settings

sys.path.insert(0, str(pathlib.Path(__file__).parent))

settings.register_profile("simulate", deadline=None, print_blob=True)
settings.load_profile("simulate")
