# SPDX-License-Identifier: Apache-2.0
"""Models, and what tests of saved tensors ask of them."""

from __future__ import annotations

import torch
from pagers import MIB, check_idle
from torch import nn
from torch.nn.functional import cross_entropy

import pagert

PAGE = 4096


def real_pager():
    """Give one real pager: what is stored does not depend on the tiers. Numbers are compared over all set-ups."""
    with pagert.Pager(device="cpu", device_bytes=MIB, host_bytes=32 * MIB, page_bytes=PAGE) as pager:
        yield pager
        if not pager.closed:
            check_idle(pager)


def bits(tensor):
    """The values as bytes: signs of zeros and NaNs count."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return tensor.dtype, tuple(tensor.shape), plain.flatten().view(torch.uint8).numpy().tobytes()


def leaf(*size, dtype=torch.float32):
    return torch.randn(size, dtype=dtype).requires_grad_()


def held(pager):
    return pager._saved.held_bytes if pager._saved is not None else 0


def saved_by(node):
    """What the saved tensors of a node come back as: names of attributes and tensors."""
    return {
        name: getattr(node, name)
        for name in dir(node)
        if name.startswith("_saved_") and isinstance(getattr(node, name), torch.Tensor)
    }


def attention():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return layer, torch.randn(2, 32, 64)


def normed_first():
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
    return layer, torch.randn(2, 32, 64)


def lstm():
    return nn.LSTM(32, 32, 2, batch_first=True), torch.randn(4, 32, 32)


def gru():
    return nn.GRU(16, 16, bidirectional=True), torch.randn(16, 4, 16)


def convolutions():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout2d(0.5), nn.AdaptiveAvgPool2d(3),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last), torch.randn(4, 3, 24, 24).to(memory_format=torch.channels_last)


def perceptron():
    net = nn.Sequential(
        nn.Linear(32, 128), nn.Tanh(), nn.Dropout(0.3), nn.Linear(128, 128), nn.Softmax(-1), nn.LayerNorm(128),
        nn.Hardswish(), nn.Linear(128, 64), nn.GLU(), nn.Softplus(), nn.PReLU(), nn.RMSNorm(32), nn.ELU(inplace=True),
    )  # fmt: skip
    return net, torch.randn(64, 32)


class Language(nn.Module):
    """An embedding, a layer, and a tied head with a loss over its logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        hidden = self.layer(self.embedding(tokens))
        logits = hidden @ self.embedding.weight.T
        return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def language():
    return Language(), torch.randint(300, (2, 24))


MODELS = [attention, normed_first, lstm, gru, convolutions, perceptron, language]


def gradients(model, inputs, context, backward=None):
    """Gradients of inputs and parameters of one pass, with the random numbers of one seed."""
    model.zero_grad()
    if inputs.is_floating_point():
        inputs = inputs.clone().requires_grad_()
    torch.manual_seed(1)
    with context:
        result = model(inputs)
        result = result[0] if isinstance(result, tuple) else result
        loss = result.square().sum()
    (backward or torch.Tensor.backward)(loss)
    found = [inputs.grad] if inputs.is_floating_point() else []
    return [loss, *found, *(parameter.grad for parameter in model.parameters())]


def nodes_of(tensor):
    found, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo.extend(parent for parent, _ in node.next_functions)
    return found
