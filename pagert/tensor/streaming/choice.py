# SPDX-License-Identifier: Apache-2.0
"""Which way of streaming an operator takes, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagert.errors import OutOfFrames

from . import derivatives, elements, joins, lookups, pointwise, products, reductions, rows
from .call import Call

if TYPE_CHECKING:
    from ..region_tensor import RegionTensor
    from ..traits import Traits

__all__ = ["run", "run_large"]


def run(
    cls: type[RegionTensor],
    traits: Traits,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    error: OutOfFrames,
) -> Any:
    """Run an operator block by block, because `error` says that its operands do not fit the device tier.

    Results that take more than a quarter of the device tier are paged, smaller ones plain; what the operator writes
    in place, or to out=, is the object that it was given.

    Raises
    ------
    OutOfFrames
        `error` itself where its operands would fit, if other windows were let go; one that extends it where the
        operator, or this way of calling it, cannot be streamed.
    """
    if error.needed_bytes is None or error.capacity_bytes is None or error.needed_bytes <= error.capacity_bytes:
        raise error
    call = Call(cls, traits, arguments, options, error)
    way = _way(traits)
    if way is None:
        if torch._C._dispatch_has_kernel_for_dispatch_key(traits.op.name(), "CompositeImplicitAutograd"):
            return traits.op.decompose(*arguments, **options)  # each of its operators comes here by itself
        raise call.refuse("it is not one of the operators that pagert knows to cut")
    return derivatives.follow(call, way(call))


def run_large(cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Run a matrix product whose result is larger than the device tier: it is paged, and made by blocks."""
    error = OutOfFrames(f"{traits.name}: its result is larger than the device tier; raise device_bytes")
    call = Call(cls, traits, arguments, options, error)
    return derivatives.follow(call, products.run(call))


def _way(traits: Traits) -> Any:
    base = traits.op._schema.name.rpartition("::")[2]
    if traits.op.namespace != "aten":
        return None
    if traits.outs and not pointwise.covers(traits.op, base):
        return None
    if base in products.NAMES:
        return products.run
    if base in rows.NAMES:
        return rows.run
    if base in lookups.NAMES:
        return lookups.run
    if base in elements.NAMES:
        return elements.run
    if base in joins.NAMES:
        return joins.run
    if reductions.covers(traits.op, base):
        return reductions.run
    return pointwise.run if pointwise.covers(traits.op, base) else None
