# SPDX-License-Identifier: Apache-2.0
"""The host engine: bytes against plain slices, and its limits."""

from __future__ import annotations

import random

import pytest

from pagert._core.flash import CopyEngine


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_random_copies_and_fills_equal_plain_slices(threads):
    draw = random.Random(threads)
    source = draw.randbytes(6 << 20)
    with CopyEngine(threads) as engine:
        for _ in range(6):
            target = bytearray(b"\xa5" * (6 << 20))
            oracle = bytearray(target)
            requests, at = [], 0
            while True:
                size = draw.choice([0, 1, 100, 4096, 50_000, 130_000, 2_500_001])
                gap = draw.randint(0, 70)
                if at + gap + size > len(target):
                    break
                at += gap
                view = memoryview(target)[at : at + size]
                if draw.random() < 0.3:
                    requests.append(("fill", view, None))
                    oracle[at : at + size] = bytes(size)
                else:
                    start = draw.randint(0, len(source) - size)
                    requests.append(("copy", view, memoryview(source)[start : start + size]))
                    oracle[at : at + size] = source[start : start + size]
                at += size
            draw.shuffle(requests)
            assert engine.run(requests) == [0] * len(requests)
            assert target == oracle


def test_more_requests_than_the_queue_holds_are_all_done():
    target = bytearray(b"\xff" * 40_000)
    views = [memoryview(target)[k : k + 8] for k in range(0, 40_000, 8)]
    with CopyEngine(2) as engine:
        assert engine.run([("fill", view, None) for view in views]) == [0] * 5000
    assert target == bytes(40_000)


def test_bad_use_is_refused_before_anything_moves():
    target = bytearray(b"\x01" * 16)
    with CopyEngine(1) as engine:
        with pytest.raises(ValueError, match="source has 8 bytes, target 16"):
            engine.run([("fill", target, None), ("copy", target, bytes(8))])
        assert target == b"\x01" * 16
        with pytest.raises(BufferError):
            engine.run([("fill", bytes(16), None)])
        assert engine.run([("read", target, None)]) == [-22]
        assert engine.run([]) == []
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.run([])
    with pytest.raises(ValueError, match="at least 1"):
        CopyEngine(0)
