# SPDX-License-Identifier: Apache-2.0
import pathlib
import sys

import pytest
import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from pagers import make_pager, one_thread, pager  # noqa: F401


class Net(nn.Module):
    """Ties, frozen and strided parameters, buffers of both kinds, several dtypes, nothing at all."""

    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(400, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, 400, bias=False)
        self.head.weight = self.embedding.weight
        self.convolution = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(60, 40).t())
        self.narrow = nn.Parameter(torch.randn(33, 31).to(torch.bfloat16), requires_grad=False)
        self.norm = nn.BatchNorm1d(width)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.register_buffer("counts", torch.arange(1500))
        self.register_buffer("mask", torch.ones(90, 90).tril().bool(), persistent=False)


@pytest.fixture
def make_net():
    """Make a module with the random numbers of a seed."""

    def make(seed=0, **changes):
        torch.manual_seed(seed)
        return Net(**changes)

    return make
