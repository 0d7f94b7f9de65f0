# SPDX-License-Identifier: Apache-2.0
"""What moves bytes: host copies and flash I/O.

Engines know addresses and sizes, not pages or tensors.
"""

from pagert._core.flash import CopyEngine, FlashFile
from pagert.engines.flash import open_flash

__all__ = ["CopyEngine", "FlashFile", "open_flash"]
