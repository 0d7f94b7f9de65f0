# SPDX-License-Identifier: Apache-2.0
"""Operators whose paged operands do not fit the device tier together: they run block by block.

`run` is what the dispatch calls where a pin was refused because the operands are larger than the device tier itself.
`run_large` is for a product whose operands may fit while its result does not.
Each file below knows one kind of operator, and how it is cut without changing what an element is computed from, or
else in which order something is added up (docs/design.md says which is which).
"""

from __future__ import annotations

from .choice import run, run_large
from .lookups import look_up

__all__ = ["look_up", "run", "run_large"]
