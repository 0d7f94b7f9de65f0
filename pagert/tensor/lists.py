# SPDX-License-Identifier: Apache-2.0
"""Operators on lists of tensors, group by group: `_foreach_*`, `_fused_adam_`, `_amp_foreach_*`.

They do the same to each index of their lists, so a list may be cut anywhere. Lists that take a good part of
the device tier are cut into small groups, so that one is fetched and one is written while one runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert.errors import OutOfFrames

from .copying import page
from .deferred import defer
from .ranges import GROUPS_IN_DEVICE, WHOLE_IN_DEVICE, groups, page_sum

if TYPE_CHECKING:
    from .region_tensor import RegionTensor
    from .traits import Traits

__all__ = ["run_list"]


def run_list(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run the operator on groups of consecutive indices; results of paged operands are paged."""
    named = dict(zip(traits.argument_names, arguments, strict=False)) | dict(options)
    lists = {name: value for name in traits.list_names if (value := named.get(name)) is not None}
    tensors = [
        value
        for value in lists.values()
        if isinstance(value, (list, tuple))
        and any(isinstance(item, torch.Tensor) for item in value)
    ]
    length = len(tensors[0])
    if any(len(value) not in (0, length) for value in lists.values()):
        return cls._dispatcher.run(traits, arguments, options)  # the kernel says what is wrong
    sizes, device_bytes = _sizes(cls, tensors, length)
    is_large = sum(sizes) > device_bytes // WHOLE_IN_DEVICE
    if traits.deferrable and is_large:
        rest = defer(cls, traits, arguments, options, length)
        if not rest:
            return None
        if len(rest) < length:
            arguments = [
                [value[index] for index in rest] if value and name in traits.list_names else value
                for name, value in zip(traits.argument_names, arguments, strict=False)
            ]
            return run_list(cls, traits, arguments, options)
    results: list[Any] = []
    returned: Any = None
    cuts = groups(sizes, device_bytes // GROUPS_IN_DEVICE) if is_large else [(0, length)]
    for start, stop in cuts:
        returned = _run_range(cls, traits, (arguments, options), (start, stop), results)
    return results if traits.op._schema.returns and results else returned


def _run_range(
    cls: type[RegionTensor],
    traits: Traits,
    call: tuple[Sequence[Any], Mapping[str, Any]],
    bounds: tuple[int, int],
    results: list[Any],
) -> Any:
    """Run one group; halve it where other pins leave less room than the group was made for."""
    start, stop = bounds
    arguments, options = call
    cut = [
        _cut(traits, traits.argument_names[position], value, start, stop)
        for position, value in enumerate(arguments)
    ]
    cut_options = {name: _cut(traits, name, value, start, stop) for name, value in options.items()}
    try:
        returned = cls._dispatcher.run(traits, cut, cut_options)
    except OutOfFrames:
        if stop - start <= 1:
            raise
        middle = (start + stop) // 2
        _run_range(cls, traits, call, (start, middle), results)
        return _run_range(cls, traits, call, (middle, stop), results)
    if isinstance(returned, (list, tuple)) and all(
        isinstance(item, torch.Tensor) for item in returned
    ):
        results.extend(_page_results(cls, cut, returned))
    return returned


def _cut(traits: Traits, name: str, value: Any, start: int, stop: int) -> Any:
    if name not in traits.list_names or value is None:
        return value
    return value[start:stop]


def _sizes(
    cls: type[RegionTensor], tensors: Sequence[Sequence[Any]], length: int
) -> tuple[list[int], int]:
    """Return what the paged operands of each index take in pages, and the device tier's size. In bytes."""
    sizes = [0] * length
    device_bytes = 0
    for value in tensors:
        for index, tensor in enumerate(value):
            if type(tensor) is cls:
                device_bytes = tensor._runtime.storage.nbytes()
                sizes[index] += page_sum(tensor, tensor._runtime.page_bytes)
    return sizes, device_bytes


def _page_results(
    cls: type[RegionTensor], arguments: Sequence[Any], results: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Page the results that have the shape of a paged operand: state, not statistics."""
    operands = next(value for value in arguments if isinstance(value, (list, tuple)))
    paged = []
    for operand, result in zip(operands, results, strict=True):
        if type(operand) is cls and type(result) is torch.Tensor and result.shape == operand.shape:
            result = page(cls, operand._runtime, result)
        paged.append(result)
    return paged
