# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: the length of the header (8 bytes, little-endian), the header (JSON), the bytes.

https://huggingface.co/docs/safetensors/en/index#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagert.errors import CheckpointError

__all__ = ["DTYPE_NAMES", "Header", "StoredTensor", "encode_header", "read_header"]

DTYPE_NAMES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Of the format's own reader: a longer header is a file of something else.
_HEADER_BYTES_MAX = 100_000_000
_METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file, in row-major order from byte `offset_bytes` on."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def encode_header(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int], int]:
    """Write the header of tensors that follow it in this order.

    Returns
    -------
    bytes, list of int, int
        The header, its length included; where in the file each tensor begins; the file's length.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    begins, end = [], 0
    for name, dtype, shape in tensors:
        begins.append(end)
        end += math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begins[-1], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes begin aligned to the widest type
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + begin for begin in begins], len(header) + end


def read_header(path: Path) -> Header:
    """Read and check what lies in a safetensors file; the tensors' bytes are not read.

    Raises
    ------
    CheckpointError
        The file is no safetensors file, or not a whole one.
    """
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or length_bytes > min(file_bytes - 8, _HEADER_BYTES_MAX):
            raise CheckpointError(
                f"{path}: no whole safetensors file: it has {file_bytes} bytes, and its header "
                f"would take {length_bytes} of at most {_HEADER_BYTES_MAX} from byte 8 on; fetch "
                "or save it again"
            )
        text = file.read(length_bytes)
    try:
        entries = json.loads(text.decode())
        if not isinstance(entries, dict):
            raise TypeError(f"the header is a {type(entries).__name__}")
        metadata = entries.pop(_METADATA, {})
        if not isinstance(metadata, dict):
            raise TypeError(f"the metadata is a {type(metadata).__name__}")
        return Header(_tensors(path, entries, 8 + length_bytes, file_bytes), metadata)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: no safetensors file: its header cannot be understood ({error!r}); fetch or "
            "save it again"
        ) from error


def _tensors(
    path: Path, entries: dict[str, Any], data_offset: int, file_bytes: int
) -> dict[str, StoredTensor]:
    found = {}
    ranges = []
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{path}: {name} is stored as {entry['dtype']}, which is not one of "
                f"{', '.join(sorted(_DTYPES))}; convert it first"
            )
        dtype = _DTYPES[entry["dtype"]]
        if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            raise CheckpointError(f"{path}: {name} has the shape {shape} at {begin} to {end}")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{path}: {name} {shape} {dtype} takes {math.prod(shape) * dtype.itemsize} bytes "
                f"and has {end - begin}; fetch or save the file again"
            )
        ranges.append((begin, end, name))
        found[name] = StoredTensor(path, name, dtype, shape, data_offset + begin)
    expected = 0
    for begin, end, name in sorted(ranges):
        if begin != expected:
            raise CheckpointError(
                f"{path}: {name} begins at byte {begin} of the data, and what lies before it ends "
                f"at {expected}; fetch or save the file again"
            )
        expected = end
    if data_offset + expected != file_bytes:
        raise CheckpointError(
            f"{path}: no whole safetensors file: it has {file_bytes} bytes, its header speaks of "
            f"{data_offset + expected}; fetch or save it again"
        )
    return found
