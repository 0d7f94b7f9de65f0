# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model in pages: what `pagert finetune` runs.

It builds on the public interface of pagert alone, and knows nothing of regions, frames or engines.
"""

from __future__ import annotations

from pagert.finetune.job import run_job
from pagert.finetune.settings import Settings

__all__ = ["Settings", "run_job"]
