# SPDX-License-Identifier: Apache-2.0
"""Operators on small operands and one training step, each for plain tensors, an empty wrapper and pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from _training import LanguageModel
from torch import nn
from torch.nn.functional import cross_entropy, embedding, linear
from torch.utils._python_dispatch import TorchDispatchMode

import pagert
from pagert.tensor import PagedTensor

__all__ = ["KINDS", "OPERATORS", "Wrapper", "converters", "count_operators", "training_step"]

KINDS = ("plain", "wrapper", "paged")

Convert = Callable[[torch.Tensor], Any]
Call = Callable[[], Any]


class Wrapper(torch.Tensor):
    """The empty dispatch wrapper: each operand is replaced by the plain tensor it holds. Results are plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype
        )
        wrapper.plain = plain
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[a.plain if type(a) is cls else a for a in args], **(kwargs or {}))


class ListWrapper(Wrapper):
    """Also looks into lists, which only some operators have: the others need not pay for it."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [
            a.plain
            if type(a) is cls
            else [b.plain if type(b) is cls else b for b in a]
            if type(a) is list
            else a
            for a in args
        ]
        return func(*plain, **(kwargs or {}))


def converters(pager: pagert.Pager, *, lists: bool = False) -> dict[str, Convert]:
    """Return what makes a tensor of each kind out of a plain one."""
    wrapper = ListWrapper if lists else Wrapper
    return {
        "plain": torch.clone,
        "wrapper": lambda plain: wrapper(plain.clone()),
        "paged": pager.tensor,
    }


def square(rows: int = 16) -> torch.Tensor:
    """Return a small square of numbers above one."""
    return torch.rand(rows, rows) + 1


def of_one(operator: Callable[[Any], Any]) -> Callable[[Convert], Call]:
    """Make the case of an operator on one operand."""

    def prepare(convert: Convert) -> Call:
        operand = convert(square())
        return lambda: operator(operand)

    return prepare


def of_two(operator: Callable[[Any, Any], Any]) -> Callable[[Convert], Call]:
    """Make the case of an operator on two operands."""

    def prepare(convert: Convert) -> Call:
        first, second = convert(square()), convert(square())
        return lambda: operator(first, second)

    return prepare


def views_in_turn(convert: Convert) -> Call:
    """Prepare views that are never the same twice in a row: nothing of the last one serves the next."""
    operand = convert(square())
    rows = itertools.cycle(range(1, 16))
    return lambda: operand[next(rows) :]


def look_up(convert: Convert) -> Call:
    """Prepare the embedding of a few tokens."""
    table, tokens = convert(square(64)), torch.randint(64, (8,))
    return lambda: embedding(tokens, table)


def layer(convert: Convert) -> Call:
    """Prepare a linear layer on a plain activation, as a model runs it."""
    weight, bias, activation = convert(square()), convert(torch.rand(16)), square()
    return lambda: linear(activation, weight, bias)


def fused_adamw(convert: Convert, count: int = 64) -> Call:
    """Prepare a step of AdamW over many small parameters, in one call."""
    lists = [[convert(square()) for _ in range(count)] for _ in range(4)]
    steps = [torch.ones(()) for _ in range(count)]
    return lambda: torch._fused_adamw_(
        *lists, [], steps, lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


OPERATORS: dict[str, Callable[[Convert], Call]] = {
    "add": of_two(lambda x, y: x + y),
    "add_": of_one(lambda x: x.add_(1)),
    "mul": of_two(lambda x, y: x * y),
    "addcdiv_": of_two(lambda x, y: x.addcdiv_(y, y)),
    "mm": of_two(lambda x, y: x @ y),
    "linear": layer,
    "softmax": of_one(lambda x: x.softmax(-1)),
    "embedding": look_up,
    "view": of_one(lambda x: x.view(-1)),
    "transpose": of_one(lambda x: x.transpose(0, 1)),
    "slice": of_one(lambda x: x[2:5]),
    "slices in turn": views_in_turn,
    "unsqueeze": of_one(lambda x: x.unsqueeze(0)),
    "detach": of_one(lambda x: x.detach()),
    "split in 4": of_one(lambda x: x.split(4)),
    "fused AdamW, 64": fused_adamw,
}
LISTS = ("fused AdamW, 64",)


def training_step(kind: str, pager: pagert.Pager, layers: int) -> Call:
    """Prepare one step of a tiny language model: forward, backward, fused AdamW."""
    torch.manual_seed(0)
    model = LanguageModel(vocabulary=256, width=64, layers=layers)
    batch, targets = torch.randint(256, (1, 16)), torch.randint(256, (16,))
    if kind == "paged":
        pager.page_(model)
    elif kind == "wrapper":
        wrap(model, pager.page_bytes // 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        cross_entropy(model(batch).flatten(0, 1), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wrap(model: nn.Module, min_bytes: int) -> None:
    """Put wrappers in the place of the parameters that `page_` would page."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.nbytes >= min_bytes:
                module._parameters[name] = ListWrapper(parameter.detach()).requires_grad_()


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.paged = self.all = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.all += 1
        self.paged += PagedTensor in types
        return func(*args, **(kwargs or {}))


def count_operators(call: Call) -> dict[str, int]:
    """Count the operators of a call, and those of them that have a paged operand."""
    with _Count() as count:
        call()
    return {"operators": count.all, "paged_operators": count.paged}
