# SPDX-License-Identifier: Apache-2.0
"""CRC32C against a bitwise calculation and published values."""

from __future__ import annotations

import random

import pytest

from pagert._core.flash import crc32c, crc32c_is_hardware


def bitwise(data: bytes, seed: int = 0) -> int:
    state = seed ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next ones: RFC 3720, section B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_values(data, checksum):
    assert crc32c(data) == checksum


# Around one word, one round of short stripes and one of long stripes, and their sums.
SIZES = [
    1,
    7,
    8,
    9,
    63,
    255,
    767,
    768,
    769,
    1535,
    4096,
    12287,
    12288,
    12289,
    13056,
    24576 + 768 + 13,
]


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_bitwise_calculation_at_every_alignment(size):
    data = random.Random(size).randbytes(size + 8)
    for start in range(0, 8, 3):
        piece = data[start : start + size]
        assert crc32c(memoryview(data)[start : start + size]) == bitwise(piece)


def test_a_seed_continues_an_earlier_checksum():
    data = random.Random(5).randbytes(30_000)
    for cut in (0, 1, 4096, 12_288, 29_999):
        assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_hardware_is_used_where_the_processor_has_it():
    with open("/proc/cpuinfo") as file:
        words = set(file.read().split())
    assert crc32c_is_hardware() == bool({"sse4_2", "crc32"} & words)
