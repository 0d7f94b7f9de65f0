# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a job. Each message gives the value, the limit and the remedy."""

from __future__ import annotations

from pagert.errors import ConfigurationError, PagertError

__all__ = [
    "BadModel",
    "BadText",
    "MissingPackage",
    "OutputExists",
    "SequenceTooLong",
    "TextTooShort",
    "UnpagedRunFailed",
    "UnsupportedModel",
]


class MissingPackage(PagertError, ImportError):
    """A package that the job needs is not installed."""


class BadModel(PagertError, ValueError):
    """The model is missing, incomplete, or its tensors do not fit its configuration."""


class UnsupportedModel(PagertError, ValueError):
    """A model of an architecture or a format that cannot be loaded."""


class BadText(PagertError, ValueError):
    """The text is missing, not text, or has words that the model does not know."""


class TextTooShort(BadText):
    """The text has too few tokens for one window to train on and one to hold out."""


class SequenceTooLong(ConfigurationError):
    """More tokens in a sequence than the model has positions for."""


class OutputExists(PagertError, FileExistsError):
    """The folder for the tuned model is there already and holds something."""


class UnpagedRunFailed(PagertError, RuntimeError):
    """The unpaged run of a comparison did not end with a report."""
