# SPDX-License-Identifier: Apache-2.0
"""What PyTorch lets a plain tensor become by `plain.data = paged` has no bytes, and every reader is told so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)

READERS = {
    "sum": lambda t: t.sum(),
    "clone": lambda t: t.clone(),
    "matmul": lambda t: t @ t,
    "in place": lambda t: t.add_(1),
    "number": lambda t: t[0, 0].item(),
    "text": repr,
    "copied from": lambda t: torch.empty(8, 8).copy_(t),
    "copied to": lambda t: t.copy_(torch.ones(8, 8)),
    "numpy": lambda t: t.numpy().sum(),
    "address": lambda t: t.data_ptr(),
    "view": lambda t: t[2:].t().sum(),
    "list operator": lambda t: torch._foreach_add([t], 1),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_plain_tensor_that_was_given_paged_data_is_refused_to_every_reader(pager, reader):
    paged = pager.tensor(torch.ones(8, 8))
    plain = nn.Parameter(torch.zeros(8, 8))
    plain.data = paged
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"[Cc]annot access|not allocated|given"):
        reader(plain.detach())
    assert paged.sum().item() == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.bool])
def test_views_between_dtypes_of_ties_in_one_region_hold_the_bytes_of_plain_ones(pager, dtype):
    module = nn.Module()
    flat = torch.arange(64, dtype=torch.uint8).remainder(2)
    module.register_buffer("whole", flat)
    module.register_buffer("part", flat[8:40].view(dtype))
    expected = module.part.clone()
    del flat
    pager.page_(module, min_bytes=0)
    assert module.part.dtype == dtype and torch.equal(module.part, expected)
    assert module.part._region is module.whole._region
