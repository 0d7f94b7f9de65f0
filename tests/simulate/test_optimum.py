# SPDX-License-Identifier: Apache-2.0
"""The offline optimum against exhaustive search, and against what the core does."""

from __future__ import annotations

import pytest
import simulate_oracles as oracles
from hypothesis import given, note, settings
from hypothesis import strategies as st

import pagert
from pagert.simulation import available_policies

PAGES = st.integers(0, 4)
READS = st.lists(st.tuples(PAGES, st.just("r")), min_size=1, max_size=14)
PAIR = st.tuples(PAGES, st.sampled_from("rrwwof"))
TOGETHER = st.lists(PAIR, min_size=1, max_size=3)
MIXED = st.lists(st.one_of(PAIR, TOGETHER), min_size=1, max_size=12)


def least_capacity(trace: oracles.Plain) -> int:
    return max(1, *(len(needed) for needed, _ in oracles.operators(trace)))


@given(READS, st.integers(1, 4))
def test_min_has_the_fewest_faults_on_reads(trace: oracles.Plain, capacity: int) -> None:
    found = pagert.simulate(trace, capacity_pages=capacity, policy="min")
    assert found.faults == oracles.least_faults(trace, capacity)
    assert found.hits + found.faults == len(trace)


@given(READS, st.integers(1, 4))
def test_pages_that_were_stored_are_fetched_at_each_fault(
    trace: oracles.Plain, capacity: int
) -> None:
    stored = pagert.Trace.from_accesses(trace, stored=True)
    found = pagert.simulate(stored, capacity_pages=capacity, policy="min")
    assert found.faults == found.fetched_pages == oracles.least_faults(trace, capacity)
    lru = pagert.simulate(stored, capacity_pages=capacity, policy="lru")
    assert lru.faults == lru.fetched_pages == oracles.lru(trace, capacity)[1]


@settings(max_examples=400)
@given(MIXED, st.integers(0, 2), st.booleans(), st.booleans())
def test_min_moves_the_fewest_pages(
    trace: oracles.Plain, spare: int, stored: bool, discard: bool
) -> None:
    capacity = least_capacity(trace) + spare
    made = pagert.Trace.from_accesses(trace, stored=stored)
    found = pagert.simulate(made, capacity_pages=capacity, policy="min", discard=discard)
    note(f"{found}")
    assert found.moved_pages == oracles.least_moved(trace, capacity, stored, discard)
    assert found.lower_bound_pages == found.moved_pages


@pytest.mark.parametrize("policy", [name for name in available_policies() if name != "min"])
@given(
    st.lists(TOGETHER, min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 4),
    st.integers(0, 4), st.booleans(),
)  # fmt: skip
def test_no_policy_of_the_core_is_better_than_min(
    policy: str, once: oracles.Plain, repeats: int, spare: int, host: int, prefetch: bool
) -> None:
    trace = once * repeats
    capacity = least_capacity(trace) + spare
    best = pagert.simulate(
        trace, capacity_pages=capacity, host_pages=host, policy="min", discard=False
    )
    real = pagert.simulate(
        trace, capacity_pages=capacity, host_pages=host, policy=policy, prefetch=prefetch
    )
    assert best.moved_pages <= real.moved_pages
    assert (
        best.flash_read_pages + best.flash_written_pages
        <= real.flash_read_pages + real.flash_written_pages
    )


@given(st.lists(st.one_of(PAIR, TOGETHER), max_size=60), st.integers(0, 4))
def test_lru_of_the_core_is_lru_by_the_book(trace: oracles.Plain, spare: int) -> None:
    capacity = least_capacity([*trace, (0, "r")]) + spare
    found = pagert.simulate(trace, capacity_pages=capacity, policy="lru")
    faults = oracles.lru(trace, capacity)[1]
    note(f"{found}")
    if all(isinstance(element, tuple) for element in trace):
        assert oracles.lru(trace, capacity) == (
            found.hits, found.faults, found.fetched_pages, found.written_pages,
        )  # fmt: skip
    else:
        # Which of the pages that one operator has let go of is the oldest is the core's choice.
        assert found.hits + found.faults == sum(oracles.lru(trace, capacity)[:2])
        assert (found.faults == 0) == (faults == 0)


@pytest.mark.parametrize("copies", [1, 3, 7])
def test_many_pages_used_alike_cost_as_many_times_one(copies: int) -> None:
    one = [[(0, "w")], [(1, "w")], [(2, "r")], [(0, "r")], [(1, "o")], [(2, "w")], [(0, "w")]] * 3
    many = [[(p * copies + k, m) for p, m in op for k in range(copies)] for op in one]
    single = pagert.simulate(one, capacity_pages=2, policy="min")
    several = pagert.simulate(many, capacity_pages=2 * copies, policy="min")
    assert several.moved_pages == copies * single.moved_pages
