# SPDX-License-Identifier: Apache-2.0
"""One operator call whose paged operands do not fit the device tier: its operands, its results, its blocks.

A block of the call is the operator itself on narrower operands, which comes back to the dispatch. Where a block does
not fit either, it is streamed in its turn, along another axis: each cut is shorter than what it cuts, so that ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert.errors import OutOfFrames
from pagert.geometry import byte_range, contiguous_stride

from ..moving import is_scattered, move, plain_like
from ..ranges import BLOCKS_IN_DEVICE, WHOLE_IN_DEVICE, page_sum, rounded, share_bytes

if TYPE_CHECKING:
    from ..region_tensor import RegionTensor
    from ..traits import Traits

__all__ = ["Call", "major_axis"]

_SEQUENCES = (list, tuple)


class Call:
    """An operator, its arguments, and the device tier that is too small for them.

    Parameters
    ----------
    cls : type
        The paged tensor's class.
    traits : Traits
        Of the operator.
    arguments, options
        As they came. At least one tensor among them is paged.
    error : OutOfFrames
        Of the attempt to pin all operands together.
    """

    def __init__(
        self,
        cls: type[RegionTensor],
        traits: Traits,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        error: OutOfFrames,
    ) -> None:
        self.cls = cls
        self.traits = traits
        self.arguments = list(arguments)
        self.options = dict(options)
        self.error = error
        self.paged: list[Any] = [one for one in self.tensors() if type(one) is cls]
        self.runtime: Any = self.paged[0]._runtime
        self.block_bytes = share_bytes(self.runtime, BLOCKS_IN_DEVICE)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensor operands, those in lists too."""
        for value in (*self.arguments, *self.options.values()):
            if isinstance(value, torch.Tensor):
                yield value
            elif type(value) in _SEQUENCES:
                yield from (one for one in value if isinstance(one, torch.Tensor))

    def named(self) -> dict[str, Any]:
        """Return all arguments by name, with the schema's defaults."""
        found = {one.name: one.default_value for one in self.traits.op._schema.arguments if one.has_default_value()}
        return found | dict(zip(self.traits.argument_names, self.arguments, strict=False)) | self.options

    def mapped(self, change: Callable[[torch.Tensor], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with each tensor replaced."""
        return (
            [_map(value, change) for value in self.arguments],
            {name: _map(value, change) for name, value in self.options.items()},
        )

    def described(self) -> list[torch.Tensor] | None:
        """Return what the operator would return, on the meta device. None where PyTorch cannot say."""
        arguments, options = self.mapped(_on_meta)
        if "device" in options:
            options["device"] = torch.device("meta")
        try:
            found = self.traits.op(*arguments, **options)
        except (NotImplementedError, RuntimeError):
            return None
        return list(found) if type(found) in _SEQUENCES else [found]

    def result(self, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> torch.Tensor:
        """Make a result without values: paged if it takes a good part of the device tier, else plain."""
        size = tuple(size)
        if torch.Size(size).numel() * dtype.itemsize > share_bytes(self.runtime, WHOLE_IN_DEVICE):
            return self.cls._reserve(self.runtime, size, stride, dtype)
        return torch.empty_strided(size, stride or contiguous_stride(size), dtype=dtype, device=self.runtime.device)

    def is_large(self, tensor: Any) -> bool:
        """Whether a tensor is paged and too large for one block."""
        return type(tensor) is self.cls and byte_range(tensor)[1] > self.block_bytes

    def pages_bytes(self, tensors: Sequence[Any]) -> int:
        """Return what the paged ones among `tensors` take on the device. In bytes."""
        page_bytes = self.runtime.page_bytes
        return sum(page_sum(one, page_bytes) for one in tensors if type(one) is self.cls)

    def cost(self, views: Sequence[Any]) -> int:
        """Return what a block takes: the pages of the paged ones, or what `near` copies of them. In bytes."""
        page_bytes = self.runtime.page_bytes
        return sum(
            one.numel() * one.itemsize if self._is_far(one) else page_sum(one, page_bytes)
            for one in views
            if type(one) is self.cls
        )

    def near(self, view: torch.Tensor) -> torch.Tensor:
        """Return a part of an operand as it is, or a plain copy of one that lies scattered over too many pages."""
        if type(view) is not self.cls or not self._is_far(view):
            return view
        return self.copied(view)

    def copied(self, view: torch.Tensor) -> torch.Tensor:
        """Return a plain copy. The order of its axes in memory is kept, because kernels look at it."""
        plain = plain_like(view)
        move(self.cls, plain, view, self.traits.name)
        return plain

    def _is_far(self, view: torch.Tensor) -> bool:
        page_bytes = self.runtime.page_bytes
        return page_sum(view, page_bytes) > self.block_bytes and is_scattered(view, page_bytes)

    def step(self, length: int, measure: Callable[[int], int]) -> int:
        """Return how long blocks of an axis of `length` may be. `measure` gives the bytes of the first so many."""
        step = length
        while step > 1 and measure(step) > self.block_bytes:
            step = (step + 1) // 2
        return rounded(step) if step < length else step

    def place(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a block into its place in a result."""
        move(self.cls, target, source, self.traits.name)

    def refuse(self, reason: str) -> OutOfFrames:
        """Return the error of a call that cannot be streamed."""
        error = OutOfFrames(f"{self.error}; {self.traits.name} cannot run block by block here: {reason}")
        error.needed_bytes, error.unpinned_bytes = self.error.needed_bytes, self.error.unpinned_bytes
        error.capacity_bytes = self.error.capacity_bytes
        return error

    def shares_written(self) -> bool:
        """Whether something that is written meets another operand, which lies otherwise, in one region."""
        written: list[Any] = []
        for position, value in [*enumerate(self.arguments), *self.options.items()]:
            if position in self.traits.written:
                written += [one for one in _leaves(value) if type(one) is self.cls]
        return any(_meet(one, other) for one in written for other in self.paged if one is not other)


def major_axis(tensor: torch.Tensor) -> int | None:
    """Return the axis along which a tensor is best cut: the one of the largest stride. None if it has one element."""
    axes = [axis for axis in range(tensor.dim()) if tensor.size(axis) > 1]
    return max(axes, key=tensor.stride, default=None)



def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in _SEQUENCES:
        return type(value)([change(one) if isinstance(one, torch.Tensor) else one for one in value])
    return value


def _leaves(value: Any) -> list[Any]:
    return list(value) if type(value) in _SEQUENCES else [value]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0 and tensor.device.type == "cpu":
        return torch.empty((), dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _meet(one: Any, other: Any) -> bool:
    if one._region is None or one._region is not other._region:
        return False
    if (one.storage_offset(), one.size(), one.stride(), one.dtype) == (
        other.storage_offset(),
        other.size(),
        other.stride(),
        other.dtype,
    ):
        return False
    (start, length), (other_start, other_length) = byte_range(one), byte_range(other)
    return bool(start < other_start + other_length and other_start < start + length)
