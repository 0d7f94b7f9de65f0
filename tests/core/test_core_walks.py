# SPDX-License-Identifier: Apache-2.0
"""Long random walks over the same world: cheaper than Hypothesis for each step, so many more of them."""

from __future__ import annotations

import os
import random

import pytest
from core_drive import Steps, close, random_shape, random_step
from core_world import World


def seeds(count: int) -> list[int]:
    """The first seeds never change, so that what they found stays found; the last ones are new."""
    if given := os.environ.get("PAGERT_TEST_SEED"):
        return [int(given)]
    return [*range(count), *(random.SystemRandom().randrange(1 << 32) for _ in range(3))]


def walk(seed: int, walks: int, step_count: int, failing: float) -> None:
    rng = random.Random(seed)
    print(f"PAGERT_TEST_SEED={seed}")
    for _ in range(walks):
        world = World(random_shape(rng))
        steps = Steps(world)
        pins_max = rng.randint(1, 6)
        for _ in range(step_count):
            random_step(steps, rng, failing, pins_max)
            world.verify()
        close(world)


@pytest.mark.parametrize("seed", seeds(6))
def test_random_walks_lose_nothing(seed: int, effort: int) -> None:
    walk(seed, walks=12 * effort, step_count=150, failing=0.0)


@pytest.mark.parametrize("seed", seeds(6))
def test_random_walks_with_failing_transfers_lose_nothing(seed: int, effort: int) -> None:
    walk(seed, walks=12 * effort, step_count=150, failing=0.2)
