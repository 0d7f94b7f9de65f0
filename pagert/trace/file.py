# SPDX-License-Identifier: Apache-2.0
"""The file of a trace: a head of fixed size, facts as JSON, compressed rows, all under one checksum."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from pagert.errors import TraceError
from pagert.trace.columns import ROW

__all__ = ["VERSION", "read", "write"]

MAGIC = b"pagert-trace\n"
VERSION = 1
# Version, bytes of facts, bytes of compressed rows, number of rows. The CRC-32 follows, of them, facts and rows.
HEAD = struct.Struct("<HIQQ")
CHECKSUM = struct.Struct("<I")


def write(
    path: str | os.PathLike[str], rows: np.ndarray, page_bytes: int, metadata: dict[str, Any]
) -> None:
    """Write a file; it appears under its name once it is whole."""
    facts = json.dumps({"page_bytes": page_bytes, "metadata": metadata}).encode()
    body = zlib.compress(rows.tobytes(), 9)
    head = HEAD.pack(VERSION, len(facts), len(body), len(rows))
    checksum = CHECKSUM.pack(_checksum(head, facts, body))
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(MAGIC + head + checksum + facts + body)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[np.ndarray, int, dict[str, Any]]:
    """Read rows, the size of a page and the metadata."""
    data = Path(path).read_bytes()
    name = os.fspath(path)
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise TraceError(f"{name} is not a trace; give a file that Trace.save() has written")
    start = len(MAGIC) + HEAD.size + CHECKSUM.size
    if len(data) >= len(MAGIC) + 2:
        (version,) = struct.unpack_from("<H", data, len(MAGIC))
        if version != VERSION:
            raise TraceError(
                f"{name} is a trace of version {version}; this pagert reads version {VERSION}: "
                "record it again"
            )
    if len(data) < start:
        raise TraceError(f"{name} is truncated: {len(data)} bytes, and the head alone has {start}")
    head = data[len(MAGIC) : len(MAGIC) + HEAD.size]
    _, facts_bytes, body_bytes, row_count = HEAD.unpack(head)
    if len(data) != start + facts_bytes + body_bytes:
        what = "truncated" if len(data) < start + facts_bytes + body_bytes else "too long"
        raise TraceError(
            f"{name} is {what}: {len(data)} bytes of {start + facts_bytes + body_bytes}; copy it again"
        )
    facts, body = data[start : start + facts_bytes], data[start + facts_bytes :]
    if CHECKSUM.pack(_checksum(head, facts, body)) != data[start - CHECKSUM.size : start]:
        raise TraceError(f"{name} is damaged: its checksum does not match; copy or record it again")
    try:
        found = json.loads(facts)
        unpack = zlib.decompressobj()
        # No more than the head says, whatever the body would swell to.
        rows = np.frombuffer(unpack.decompress(body, row_count * ROW.itemsize + 1), ROW)
        if len(rows) != row_count:
            raise ValueError(f"{len(rows)} rows of {row_count}")
        return rows, int(found["page_bytes"]), dict(found["metadata"])
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise TraceError(f"{name} is damaged: {error}; record it again") from None


def _checksum(*parts: bytes) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value
