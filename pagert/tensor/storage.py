# SPDX-License-Identifier: Apache-2.0
"""What a paged tensor shows as its storage: how large it is and whose it is, and no memory."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from pagert.errors import UnsupportedOperator

__all__ = ["PagedStorage"]


class PagedStorage:
    """Stands for the bytes of a region. Two are equal if their tensors share bytes.

    Savers ask it how large the whole is that a tensor is a part of. It has the methods of
    `torch.UntypedStorage` that need no memory; the others are refused by name.
    """

    __slots__ = ("__weakref__", "_storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage  # has a size and no memory

    def nbytes(self) -> int:
        """Return the size of the region in bytes."""
        return self._storage.nbytes()

    def size(self) -> int:
        """Return the number of elements, which are bytes."""
        return self._storage.nbytes()

    def __len__(self) -> int:
        return self._storage.nbytes()

    def element_size(self) -> int:
        """Return 1: the elements are bytes."""
        return 1

    def resizable(self) -> bool:
        """Return False: a region has a fixed size."""
        return False

    def is_shared(self) -> bool:
        """Return False: pages belong to one process."""
        return False

    def is_pinned(self, device: Any = None) -> bool:
        """Return False: the pages are the pager's, wherever they lie."""
        return False

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._storage.device

    @property
    def is_cuda(self) -> bool:
        """Whether the device that computes is a GPU of CUDA."""
        return self._storage.device.type == "cuda"

    @property
    def _cdata(self) -> int:
        return self._storage._cdata

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagedStorage) and other._cdata == self._cdata

    def __hash__(self) -> int:
        return hash(self._cdata)

    def __repr__(self) -> str:
        return f"PagedStorage(nbytes={self.nbytes()}, device={self.device})"

    def data_ptr(self) -> NoReturn:
        """Refuse by name: there is no fixed address."""
        self._refuse("data_ptr")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("__getitem__")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or not hasattr(torch.UntypedStorage, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise UnsupportedOperator(
            f"{name}() of the storage of a paged tensor: its bytes move between tiers, so there is "
            "no address to give; use `with t.resident() as dense:` and take it from the plain "
            "tensor inside"
        )
