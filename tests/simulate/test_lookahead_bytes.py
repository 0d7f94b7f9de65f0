# SPDX-License-Identifier: Apache-2.0
"""Lookahead beside the offline optimum where evictions cost nothing, one transfer or two."""

from __future__ import annotations

import pytest

import pagert
from pagert.trace import Access, Operator, Release, Reserve, Step, Trace

STEPS = 10


def training(pages: list[int]) -> Trace:
    """One weight, gradient and two moments for each layer: forward, backward, Adam, as training does."""
    trace = Trace(page_bytes=4096)
    count = 0

    def reserve(size: int) -> int:
        nonlocal count
        trace.append(Reserve(count, size))
        count += 1
        return count - 1

    def run(*uses: tuple[int, int, str]) -> None:
        trace.append(Operator(tuple(Access(region, 0, size, mode) for region, size, mode in uses)))

    weights = [reserve(size) for size in pages]
    moments = [(reserve(size), reserve(size)) for size in pages]
    for weight, size in zip(weights, pages):
        run((weight, size, "o"))
    for _ in range(STEPS):
        for weight, size in zip(weights, pages):
            run((weight, size, "r"))
        gradients = {}
        for layer in reversed(range(len(pages))):
            run((weights[layer], pages[layer], "r"))
            gradients[layer] = reserve(pages[layer])
            run((gradients[layer], pages[layer], "o"))
        for layer, size in enumerate(pages):
            state = [(moment, size, "w") for moment in moments[layer]]
            run((weights[layer], size, "w"), (gradients[layer], size, "r"), *state)
        for gradient in gradients.values():
            trace.append(Release(gradient))
        trace.append(Step())
    return trace


@pytest.mark.parametrize("pages", [[8] * 24, [4, 12] * 16, [1, 2, 3, 5, 8, 13] * 6])
@pytest.mark.parametrize("share", [0.2, 0.35, 0.5])
def test_steady_bytes_are_near_what_the_optimum_needs(pages, share):
    trace = training(pages)
    capacity = int(4 * sum(pages) * share)
    moved = {
        policy: sum(
            step.moved_pages
            for step in pagert.simulate(trace, capacity_pages=capacity, policy=policy).steady_steps
        )
        for policy in ("lru", "lookahead", "min")
    }
    print(capacity, {name: round(value / moved["min"], 3) for name, value in moved.items()})
    assert moved["lookahead"] <= 1.05 * moved["min"]
    assert moved["lookahead"] < moved["lru"]
