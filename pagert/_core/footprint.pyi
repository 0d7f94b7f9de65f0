# SPDX-License-Identifier: Apache-2.0
"""Where a tensor's bytes are in its region, and what was made of that at its last call."""

import torch

class Footprint:
    """A tensor's bytes in its region, and the dense view of its last call."""

def geometry(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of the same geometry over the same storage, which has no memory."""
