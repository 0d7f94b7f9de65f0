# SPDX-License-Identifier: Apache-2.0
"""How `torch.save` is given the bytes of paged tensors: one tensor at a time, when it writes them.

`torch.save` pickles all tensors first and keeps their storages until it writes these. A storage on
another device it asks for a copy then, so a storage that has not been read yet says that it lies on one.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

import torch

from pagert.geometry import byte_range, fills_range

from . import copying

if TYPE_CHECKING:
    from .region_tensor import RegionTensor

__all__ = ["is_saving", "reduce_unread"]

_SAVING = (torch.serialization._save.__code__, torch.serialization._legacy_save.__code__)


class _UnreadStorage(torch.UntypedStorage):
    """The bytes of one paged tensor, which are read when they are written to the file."""

    _tensor: RegionTensor
    _legacy: bool = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    @property
    def _cdata(self) -> Any:
        # What torch tells storages apart by: two names of one tensor are one.
        storage = torch._C.TensorBase.untyped_storage(self._tensor)
        return (storage._cdata, *byte_range(self._tensor), self._tensor.dtype)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._tensor.device if self._legacy else torch.device("meta")

    def nbytes(self) -> int:
        return byte_range(self._tensor)[1]

    def data_ptr(self) -> int:
        # Of a storage on the meta device it is asked for in the old format only, which writes
        # storages itself.
        self._legacy = True
        return 0

    def cpu(self) -> torch.UntypedStorage:
        return copying.load(type(self._tensor), self._tensor).cpu().untyped_storage()

    def _write_file(self, *arguments: Any) -> Any:
        return self.cpu()._write_file(*arguments)


def is_saving() -> bool:
    """Tell whether `torch.save` itself asks the caller's caller how a tensor is pickled."""
    return sys._getframe(3).f_code in _SAVING


def reduce_unread(
    tensor: RegionTensor, is_parameter: bool, attributes: dict[str, Any]
) -> Any | None:
    """Return how `torch.save` writes a tensor without reading it now. None: not possible."""
    if (
        tensor._region is None
        or not fills_range(tensor)
        or tensor.is_neg()
        or tensor.is_conj()
        or tensor.dtype not in torch.storage._dtype_to_storage_type_map()
    ):
        return None
    same = cast("RegionTensor", tensor.detach())
    hooks: OrderedDict[Any, Any] = OrderedDict()
    if is_parameter:
        if attributes:
            return torch._utils._rebuild_parameter_with_state, (
                same,
                tensor.requires_grad,
                hooks,
                attributes,
            )
        return torch._utils._rebuild_parameter, (same, tensor.requires_grad, hooks)
    unread = _UnreadStorage(0, device="meta")
    unread._tensor = same
    storage = torch.storage.TypedStorage(wrap_storage=unread, dtype=tensor.dtype, _internal=True)
    storage._fake_device = tensor.device
    arguments = (storage, 0, tuple(tensor.size()), tensor.stride(), tensor.requires_grad, hooks)
    if attributes:
        return torch._tensor._rebuild_from_type_v2, (
            torch._utils._rebuild_tensor_v2,
            torch.Tensor,
            arguments,
            attributes,
        )
    return torch._utils._rebuild_tensor_v2, arguments
