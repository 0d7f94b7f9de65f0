# SPDX-License-Identifier: Apache-2.0
"""How much the core is tested: set PAGERT_TEST_PROFILE to `quick`, `default` or `long`.

PAGERT_TEST_SEED replaces the seeds of the random walks by one, to repeat a run that failed.
"""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings

# The tests of this folder share modules; pytest's importlib mode leaves it off the path.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "report_multiple_bugs": False,
    "verbosity": Verbosity.normal,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
# Shrinking takes minutes; a violation prints its calls anyhow, and the long profile shrinks it.
_UNSHRUNK = {**_COMMON, "phases": [Phase.explicit, Phase.reuse, Phase.generate]}
settings.register_profile("pagert-quick", max_examples=20, stateful_step_count=40, **_UNSHRUNK)
settings.register_profile("pagert-default", max_examples=200, stateful_step_count=60, **_UNSHRUNK)
settings.register_profile("pagert-long", max_examples=3000, stateful_step_count=120, **_COMMON)

PROFILE = os.environ.get("PAGERT_TEST_PROFILE", "default")
settings.load_profile(f"pagert-{PROFILE}")


@pytest.fixture(scope="session")
def effort() -> int:
    """Factor on the length of what has one: 1, or 20 in the long profile."""
    return 20 if PROFILE == "long" else 1
