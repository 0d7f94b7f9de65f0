# SPDX-License-Identifier: Apache-2.0
"""What compilers and tracers may do around paged tensors.

With `torch.compile` their operators run as they are, and its graphs break there.

To Dynamo a paged tensor is an object like any other, because its class brings a `__torch_dispatch__` and says nothing
of inner tensors. No operator on it gets into a graph, so no residency does either; what lies between is compiled.
What is left is to keep Dynamo from compiling the paging itself, piece by piece, whenever an operator gets there.

Tracers below the operators (`make_fx`, `torch.func.linearize`, `torch.export`) would record what an operator does on
dense views, which are gone when the recorded graph runs: they are refused.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from .errors import UnsupportedOperator

__all__ = ["keep_out", "refuse_tracers"]

_KEYS: Any = torch._C._TorchDispatchModeKey  # type: ignore[attr-defined]
_TRACERS = {
    _KEYS.PROXY: "make_fx, torch.func.linearize or torch.export",
    _KEYS.FUNCTIONAL: "the functionalization of a tracer",
    _KEYS.FAKE: "FakeTensorMode",
}


def refuse_tracers(operator: Any) -> None:
    """Raise `UnsupportedOperator` where a tracer would record an operator's work on memory that does not stay.

    Other modes (counters, loggers, caches) see the operator itself, before it comes here.
    """
    for key, name in _TRACERS.items():
        if torch._C._get_dispatch_mode(key) is not None:  # type: ignore[attr-defined]
            raise UnsupportedOperator(
                f"{operator} on a paged tensor is being traced by {name}: a graph would keep "
                "addresses that do not last; trace with plain tensors, `t.numpy(force=True)` or "
                "`pager.unpage_(module)`, or use torch.compile"
            )


def keep_out(package: str) -> None:
    """Have Dynamo run the functions of a package's loaded modules without a look into them.

    What `torch._dynamo.disable` does for one function, without an import of Dynamo, which takes seconds and memory.
    """
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for function in _functions(module):
                marked: Any = function
                marked._torchdynamo_disable = True  # not to be inlined
                marked._torchdynamo_disable_msg = f"{package} moves bytes"
                for code in _codes(function.__code__):
                    frames.set_code_exec_strategy(code, skip)


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    kinds = [one for one in vars(module).values() if inspect.isclass(one)]
    for place in (module, *kinds):
        for value in vars(place).values():
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
                if (
                    isinstance(function, types.FunctionType)
                    and function.__module__ == module.__name__
                ):
                    yield function


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
