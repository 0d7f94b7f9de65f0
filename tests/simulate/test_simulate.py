# SPDX-License-Identifier: Apache-2.0
"""What `pagert.simulate` and `pagert simulate` accept and refuse."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import pytest
import simulate_oracles as oracles

import pagert
from pagert.cli import main
from pagert.simulation import available_policies
from pagert.trace import Access, Operator, Reserve, Step, Trace

LOOP = [(page, "w") for _ in range(4) for page in range(6)]


def test_the_function_stays_a_function() -> None:
    import pagert.simulation

    assert pagert.simulate is pagert.simulation.simulate
    assert callable(pagert.simulate)


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="policy is 'fifo'; allowed: 'lru', 'lookahead', 'min'"):
        pagert.simulate(LOOP, capacity_pages=3, policy="fifo")


def test_a_policy_that_the_core_lacks_is_refused_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagert.simulation.replay.has_policy", lambda policy: policy == "lru")
    assert available_policies() == ("lru", "min")
    with pytest.raises(pagert.ConfigurationError, match="there are 'lru', and 'min'"):
        pagert.simulate(LOOP, capacity_pages=3, policy="lookahead")


@pytest.mark.parametrize("policy", available_policies())
def test_a_capacity_below_one_operator_says_what_it_needs(policy: str) -> None:
    trace = [(0, "r"), [(1, "r"), (2, "w"), (3, "o"), (1, "w")]]
    with pytest.raises(pagert.ConfigurationError, match=r"operator 1 .* needs 3 .* at least 3"):
        pagert.simulate(trace, capacity_pages=2, policy=policy)
    assert pagert.simulate(trace, capacity_pages=3, policy=policy).faults == 4


@pytest.mark.parametrize("capacity", [0, -1, 2**32, "8", 1.5, None])
def test_capacities_that_are_none_are_refused(capacity: object) -> None:
    with pytest.raises(pagert.ConfigurationError, match="capacity_pages is"):
        pagert.simulate(LOOP, capacity_pages=capacity)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", available_policies())
def test_an_empty_trace_moves_nothing(policy: str) -> None:
    found = pagert.simulate([], capacity_pages=1, policy=policy)
    assert (found.hits, found.faults, found.moved_pages) == (0, 0, 0)
    assert len(found.steps) == 1


def test_results_are_frozen() -> None:
    found = pagert.simulate(LOOP, capacity_pages=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.hits = 1  # type: ignore[misc]


def test_flash_is_spared_by_a_host_tier_that_holds_the_rest() -> None:
    for policy in available_policies():
        found = pagert.simulate(LOOP, capacity_pages=3, host_pages=8, policy=policy)
        assert found.moved_pages > 0
        assert (found.flash_read_pages, found.flash_written_pages) == (0, 0)


def training(steps: int) -> Trace:
    """Weights and state of four layers, updated in each step."""
    trace = Trace([Reserve(layer, 64) for layer in range(4)], page_bytes=4096)
    for _ in range(steps):
        for mode in "rw":
            for layer in range(4):
                trace.append(Operator((Access(layer, 0, 64, mode),)))
        trace.append(Step())
    return trace


def test_steps_sum_up_to_the_whole() -> None:
    for policy in available_policies():
        found = pagert.simulate(training(5), capacity_pages=100, policy=policy)
        assert len(found.steps) == found.finished_steps == 5
        assert found.steady_steps == found.steps[2:4]
        for name in ("hits", "faults", "fetched_pages", "written_pages"):
            assert sum(getattr(step, name) for step in found.steps) == getattr(found, name)
    short = pagert.simulate(training(2), capacity_pages=100)
    assert short.steady_steps == short.steps[1:]
    long = pagert.simulate(training(8), capacity_pages=100)
    assert long.steady_steps == long.steps[4:7]


def test_without_scipy_min_is_exact_on_reads_and_says_what_it_needs_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    reads = [(page, "r") for _ in range(4) for page in range(6)]
    found = pagert.simulate(reads, capacity_pages=3, policy="min")
    assert found.faults == oracles.least_faults(reads, 3)
    mixed = [[(0, "w")], [(1, "r")], [(0, "r")], [(1, "w")], [(2, "r")], [(0, "r"), (1, "r")]]
    with pytest.raises(pagert.ConfigurationError, match=r"pagert\[bench\]"):
        pagert.simulate(mixed, capacity_pages=2, policy="min")


def test_prefetched_pages_are_hits_that_cost_a_fetch() -> None:
    loop = Trace.from_accesses([(page, "r") for _ in range(9) for page in range(6)], stored=True)
    for policy in available_policies():
        plain = pagert.simulate(loop, capacity_pages=4, policy=policy)
        assert (plain.faults, plain.prefetched_pages) == (plain.fetched_pages, 0)
        ahead = pagert.simulate(loop, capacity_pages=4, policy=policy, prefetch=True)
        assert ahead.fetched_pages >= ahead.faults
        assert ahead.hits + ahead.faults == 54


@pytest.fixture
def trace_file(tmp_path: pathlib.Path) -> pathlib.Path:
    training(5).save(tmp_path / "made.trace")
    return tmp_path / "made.trace"


def test_the_command_writes_what_simulate_says(
    trace_file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = trace_file.with_name("report.json")
    words = [str(trace_file), "--device-bytes", "400KiB,600KiB", "--host-bytes", "0,512KiB"]
    assert main(["simulate", *words, "--json", str(report)]) == 0
    shown = capsys.readouterr().out
    assert "400 KiB" in shown and "min" in shown and "█" in shown
    results = json.loads(report.read_text())["results"]
    assert [(row["device_bytes"], row["host_bytes"]) for row in results] == [
        (400 << 10, 0), (600 << 10, 0), (400 << 10, 512 << 10), (600 << 10, 512 << 10),
    ]  # fmt: skip
    for row in results:
        for policy, figures in row["policies"].items():
            found = pagert.simulate(
                Trace.load(trace_file), capacity_pages=row["device_bytes"] // 4096,
                host_pages=row["host_bytes"] // 4096, policy=policy,
            )  # fmt: skip
            assert figures["fetched_bytes"] == found.fetched_pages * 4096
            assert figures["flash_written_bytes"] == found.flash_written_pages * 4096
            steady = found.steady_steps
            assert figures["written_bytes_per_step"] * len(steady) == 4096 * sum(
                step.written_pages for step in steady
            )


def test_a_sweep_ends_where_everything_fits(
    trace_file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = trace_file.with_name("report.json")
    assert main(["simulate", str(trace_file), "--sweep", "3", "--json", str(report)]) == 0
    results = json.loads(report.read_text())["results"]
    assert [row["device_bytes"] >> 12 for row in results] == [64, 160, 256]
    assert all(row["fetched_bytes"] == 0 for row in results[-1]["policies"].values())
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-bytes", "8KiB"], "needs 256 KiB together"),
        (["--device-bytes", "much"], "not a size"),
        (["--policy", "fifo"], "does not exist; allowed: 'lru'"),
        (["--sweep", "1"], "at least 2"),
        (["--plot", "figure.gif"], ".png or .svg"),
        (["--json", "missing/report.json"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_that_says_what_is_allowed(
    trace_file: pathlib.Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace_file), *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
