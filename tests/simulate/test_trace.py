# SPDX-License-Identifier: Apache-2.0
"""Traces: what they hold, what they refuse, and their files."""

from __future__ import annotations

import pathlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagert
from pagert.trace import Access, Operator, Release, Reserve, Step, Trace

PAIR = st.tuples(st.integers(0, 9), st.sampled_from("rwof"))
PLAIN = st.lists(st.one_of(PAIR, st.lists(PAIR, max_size=4)), max_size=40)


def some_trace() -> Trace:
    return Trace(
        [
            Reserve(0, 10, stored=True),
            Reserve(1, 4),
            Operator((Access(0, 0, 10, "r"), Access(1, 0, 4, "o"))),
            Step(),
            Release(1),
            Operator((Access(0, 2, 3, "w"),)),
        ],
        page_bytes=4096,
        metadata={"model": "made", "steps": 1},
    )


def test_iteration_gives_back_what_was_appended() -> None:
    trace = some_trace()
    events = list(trace)
    assert Trace(events, page_bytes=4096, metadata=trace.metadata) == trace
    assert len(trace) == len(events) == 6
    assert events[2] == Operator((Access(0, 0, 10, "r"), Access(1, 0, 4, "o")))
    assert (trace.operator_count, trace.step_count, trace.page_uses) == (2, 1, 17)
    assert (trace.peak_pages, trace.largest_operator) == (14, (0, 14))


def test_what_is_saved_is_loaded(tmp_path: pathlib.Path) -> None:
    some_trace().save(tmp_path / "a")
    assert Trace.load(tmp_path / "a") == some_trace()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@given(plain=PLAIN)
def test_any_trace_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, plain: list
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace"
    trace = Trace.from_accesses(plain, page_bytes=8192)
    trace.save(path)
    assert Trace.load(path) == trace


def test_every_truncation_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    some_trace().save(path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(pagert.TraceError, match=r"truncated|not a trace"):
            Trace.load(path)
    path.write_bytes(data + b"x")
    with pytest.raises(pagert.TraceError, match="too long"):
        Trace.load(path)


def test_every_changed_byte_is_noticed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    some_trace().save(path)
    data = path.read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x55
        path.write_bytes(changed)
        with pytest.raises(pagert.TraceError):
            Trace.load(path)


def test_another_version_says_which_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    some_trace().save(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, len(b"pagert-trace\n"), 9)
    path.write_bytes(data)
    with pytest.raises(pagert.TraceError, match="version 9; this pagert reads version 1"):
        Trace.load(path)


def test_a_file_that_is_no_trace_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    path.write_text("hello\n" * 100)
    with pytest.raises(ValueError, match=r"is not a trace; give a file that Trace.save"):
        Trace.load(path)
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "missing")


def test_accesses_of_one_operator_that_overlap_are_cut_and_joined() -> None:
    trace = Trace([Reserve(0, 10)], page_bytes=4096)
    trace.append(Operator((Access(0, 0, 6, "r"), Access(0, 4, 4, "o"), Access(0, 8, 2, "o"))))
    assert list(trace)[1] == Operator(
        (Access(0, 0, 4, "r"), Access(0, 4, 2, "w"), Access(0, 6, 4, "o"))
    )
    assert trace.page_uses == 10


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Operator((Access(1, 0, 1, "r"),)), "does not exist"),
        (Operator((Access(0, 3, 2, "r"),)), "which has 4"),
        (Operator((Access(0, -1, 2, "r"),)), "which has 4"),
        (Operator((Access(0, 0, 0, "r"),)), "0 pages"),
        (Operator((Access(0, 0, 1, "x"),)), "there are 'r', 'w' and 'o'"),
        (Operator((Access(0, 0, 1, ""),)), "there are 'r', 'w' and 'o'"),
        (Release(7), "does not exist"),
        (Reserve(5, 1), "number 1 is next"),
        (Reserve(1, 0), "0 pages"),
        ("r", "there are Reserve"),
    ],
)
def test_events_that_make_no_sense_are_refused(event: object, message: str) -> None:
    trace = Trace([Reserve(0, 4)], page_bytes=4096)
    with pytest.raises(pagert.TraceError, match=message):
        trace.append(event)  # type: ignore[arg-type]
    assert len(trace) == 1


@pytest.mark.parametrize(
    "plain", [[3], [(1, "q")], [(-1, "r")], [("a", "r")], [(1.5, "r")], [[(1, "r", 2)]], ["rr"]]
)
def test_plain_sequences_that_make_no_sense_are_refused(plain: list) -> None:
    with pytest.raises(pagert.TraceError, match="element 0"):
        Trace.from_accesses(plain)


def test_a_page_that_was_released_is_zero_again() -> None:
    plain = [(0, "w"), (0, "f"), (0, "r"), (1, "r"), (0, "r")]
    found = pagert.simulate(plain, capacity_pages=1, policy="lru")
    assert (found.fetched_pages, found.written_pages) == (0, 0)


def test_pages_of_a_list_are_released_after_its_operator() -> None:
    assert list(Trace.from_accesses([[(4, "f"), (4, "r"), (5, "w")]]))[2:] == [
        Operator((Access(0, 0, 1, "r"), Access(1, 0, 1, "w"))),
        Release(0),
    ]
