# SPDX-License-Identifier: Apache-2.0
"""Random walks over the same world: a step is cheaper than one of Hypothesis, so there are more."""

from __future__ import annotations

import os
import random

import pytest
from core_model import Violation
from core_steps import random_walk


def seeds(count: int) -> list[int]:
    """The first seeds never change, so that what they found stays found; the last ones are new."""
    if given := os.environ.get("PAGERT_TEST_SEED"):
        return [int(given)]
    return [*range(count), *(random.SystemRandom().randrange(1 << 32) for _ in range(3))]


def walk(seed: int, walks: int, failing: float) -> None:
    print(f"PAGERT_TEST_SEED={seed}")
    rng = random.Random(seed)
    for _ in range(walks):
        found = random_walk(rng, 150, failing)
        if found.violation() is not None:
            raise Violation(f"seed {seed}: {found.shrink().violation()}")


@pytest.mark.parametrize("seed", seeds(6))
def test_random_walks_lose_nothing(seed: int, effort: int) -> None:
    walk(seed, walks=12 * effort, failing=0.0)


@pytest.mark.parametrize("seed", seeds(6))
def test_random_walks_with_failing_transfers_lose_nothing(seed: int, effort: int) -> None:
    walk(seed, walks=12 * effort, failing=0.2)
