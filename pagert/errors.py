# SPDX-License-Identifier: Apache-2.0
"""The exceptions of pagert. Each message gives the value, the limit and the remedy."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "ConfigurationError",
    "ConfigurationTypeError",
    "ForeignTensor",
    "OutOfFrames",
    "PagerClosed",
    "PagertError",
    "StepError",
    "TierFull",
    "TraceError",
    "TransferError",
    "TransferTimeout",
    "UnsupportedOperator",
    "UnsupportedTensor",
]


class PagertError(Exception):
    """Base of all errors that pagert itself raises. Those of the operating system are `OSError`."""


class ConfigurationError(PagertError, ValueError):
    """A setting is out of range, unknown, or does not fit another one."""


class ConfigurationTypeError(ConfigurationError, TypeError):
    """A setting has the wrong type."""


class PagerClosed(PagertError):
    """The pager was closed; its tensors have no bytes any more."""


class OutOfFrames(PagertError, MemoryError):
    """The operands of one operator do not fit the device tier beside what is pinned.

    Where the pump has counted them: what the operands need, what is unpinned, and the device tier.
    """

    needed_bytes: int | None = None
    unpinned_bytes: int | None = None
    capacity_bytes: int | None = None


class TierFull(PagertError, MemoryError):
    """Dirty pages must leave the device, and no lower tier has room for them. Nothing is lost."""


class TraceError(PagertError, ValueError):
    """A file that is no trace, is truncated or of another version; or events that make no sense."""


class TransferError(PagertError, OSError):
    """A transfer failed. `errno` and, for flash, `filename` are set. Nothing dirty is lost."""


class TransferTimeout(PagertError, TimeoutError):
    """A transfer did not come back before the deadline."""


class CheckpointError(PagertError, ValueError):
    """A checkpoint's files are no safetensors files, not whole, or do not belong together."""


class CheckpointMismatch(PagertError, RuntimeError):
    """A checkpoint lacks tensors of the model, has others, or has them in other shapes."""


class UnsupportedTensor(PagertError, TypeError):
    """A tensor that cannot be paged: sparse, quantized, on another device."""


class UnsupportedOperator(PagertError, NotImplementedError):
    """An operator that cannot run on paged tensors without risk of a stale or partial copy."""


class StepError(PagertError, RuntimeError):
    """A step that runs in the backward pass cannot go on: half of it is done, or its rules were broken."""


class ForeignTensor(PagertError, ValueError):
    """Tensors of two pagers meet in one operator."""
