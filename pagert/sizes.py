# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction
from typing import Any

from pagert.errors import ConfigurationError, ConfigurationTypeError

__all__ = ["format_bytes", "parse_bytes", "whole_number"]

_BYTES_PER_UNIT = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_UNITS_BY_LOWER_NAME = {name.lower(): size for name, size in _BYTES_PER_UNIT.items()}
_SIZE = re.compile(r"([+-]?)([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*([A-Za-z]*)")

_SIZE_BYTES_MAX = 2**63 - 1  # sizes and file offsets are signed 64-bit numbers in the kernel

def parse_bytes(size: int | str, *, name: str = "size") -> int:
    """Read a size in bytes.

    Parameters
    ----------
    size : int or str
        A whole number of bytes, or a number with a unit: B, KiB, MiB, GiB, TiB (powers of 1024) or
        KB, MB, GB, TB (powers of 1000). Letter case and spaces around the unit do not count. A
        fraction of a byte is dropped.
    name : str
        What the size is for; it appears in the message of an error.

    Returns
    -------
    int
        Bytes, zero or more.

    Raises
    ------
    ConfigurationError
        The text is not a size, or the size is negative or needs more than 63 bits.
    ConfigurationTypeError
        `size` is neither a whole number nor text.

    Examples
    --------
    >>> parse_bytes("512MiB")
    536870912
    >>> parse_bytes("1.5 KB")
    1500
    >>> parse_bytes(4096)
    4096
    """
    if isinstance(size, str):
        size_bytes = _parse_size_text(size, name)
    else:
        size_bytes = whole_number(size, name, "a whole number of bytes or text such as '512MiB'")
    if size_bytes < 0:
        raise ConfigurationError(f"{name} is {size!r}, which is negative; give a positive size")
    if size_bytes > _SIZE_BYTES_MAX:
        raise ConfigurationError(
            f"{name} is {size!r}; the largest size is {_SIZE_BYTES_MAX} bytes; give a smaller one"
        )
    return size_bytes


def format_bytes(size_bytes: float) -> str:
    """Write a size for people to read, in the largest unit of 1024 bytes that it fills.

    Parameters
    ----------
    size_bytes : int or float
        Bytes; a rate or an average may have a fraction.

    Examples
    --------
    >>> format_bytes(536870912)
    '512 MiB'
    >>> format_bytes(1_600_000)
    '1.53 MiB'
    >>> format_bytes(0)
    '0 B'
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    amount = float(size_bytes)
    for unit in units:
        # 1023.996 would be written as 1024: then the next unit is the one that it fills.
        if round(abs(amount), 2) < 1024 or unit == units[-1]:
            break
        amount /= 1024
    digits = f"{amount:.2f}".rstrip("0").rstrip(".")
    return f"{digits} {unit}"


def whole_number(number: Any, name: str, wanted: str) -> int:
    """Return a setting as an int; a `ConfigurationTypeError` says that `wanted` was wanted where it is none."""
    # True is an int in Python, but `host_bytes=True` is a mistake and not one byte.
    if not isinstance(number, bool):
        try:
            return operator.index(number)
        except TypeError:
            pass
    raise ConfigurationTypeError(
        f"{name} is {number!r} of type {type(number).__name__}; give {wanted}"
    )


def _parse_size_text(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = None
    if match is not None:
        unit_bytes = _UNITS_BY_LOWER_NAME.get(match[3].lower() or "b")
    if match is None or unit_bytes is None:
        raise ConfigurationError(
            f"{name} is {text!r}, which is not a size; give bytes, or a number with one of the "
            f"units {', '.join(_BYTES_PER_UNIT)}, for example '512MiB'"
        )
    size_bytes = math.floor(Fraction(match[2]) * unit_bytes)
    return -size_bytes if match[1] == "-" else size_bytes
