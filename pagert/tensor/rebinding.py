# SPDX-License-Identifier: Apache-2.0
"""A tensor becomes another look at bytes that exist: `set_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pagert.errors import UnsupportedOperator
from pagert.geometry import describe

if TYPE_CHECKING:
    from .region_tensor import RegionTensor
    from .traits import Traits

__all__ = ["run_set"]


def run_set(
    cls: type[RegionTensor], traits: Traits, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Let a paged tensor look at the bytes of another paged one, as `a.set_(b)` does.

    The object and its history stay, and autograd counts it as a change in place. A plain source has
    become paged above (`PagedTensor.set_`), or it is refused here; so is a plain target, which would
    lose its class.
    """
    target, source = arguments[0], arguments[1] if len(arguments) > 1 else options["source"]
    if type(target) is not cls or type(source) is not cls:
        plain = source if type(target) is cls else target
        raise UnsupportedOperator(
            f"{traits.name} between a paged tensor and a plain one {describe(plain)}: they cannot have "
            "the same bytes; give it a paged tensor, pager.tensor(x), or use copy_"
        )
    if target is not source:
        target._rebind(cast("RegionTensor", source.detach()))
    return target
