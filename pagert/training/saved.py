# SPDX-License-Identifier: Apache-2.0
"""The bytes that autograd keeps for the backward pass, in pages: each storage once for each state of it.

It knows storages and versions, not hooks. What is stored belongs to whoever holds the `Stored`: nothing here keeps it
alive, so that its pages go with the last graph that needs them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pagert.errors import OutOfFrames, TierFull
from pagert.geometry import byte_range, describe
from pagert.tensor.paged_tensor import PagedTensor

if TYPE_CHECKING:
    from pagert.runtime import Runtime

__all__ = ["Saved", "Stored"]

# A range starts at a multiple of this in its storage, so that views of any dtype start at an element.
_ALIGN_BYTES = 64

# Tensors of which some may be gone: an operator's are used together, and not in the order in which they were saved.
_LOOK_BACK = 16

# The part of the device tier that is fetched ahead of a backward pass where the policy does not.
_AHEAD_PARTS = 8


class Stored:
    """A range of one storage in pages, with the values of one version.

    Attributes
    ----------
    pages : PagedTensor
        The bytes, shape (size_bytes,), uint8.
    start_bytes, end_bytes : int
        The range of the storage.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_coming",
        "_number",
        "_root",
        "_saved",
        "_storage",
        "_version",
        "end_bytes",
        "pages",
        "start_bytes",
    )

    def __init__(
        self,
        saved: Saved,
        number: int,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        start_bytes: int,
        pages: PagedTensor,
    ) -> None:
        self._saved = saved
        self._number = number  # in the order in which tensors were stored
        self._coming = False  # its pages were asked for already
        # As long as this weak reference lives, no new storage can take the place of the old one in memory, and with
        # it the key under which `Saved` finds it.
        self._storage = StorageWeakRef(storage)
        self._root = weakref.ref(_root(tensor))
        self._version = tensor._version
        self._address = storage.data_ptr()
        self.start_bytes = start_bytes
        self.end_bytes = start_bytes + pages.numel()
        self.pages = pages

    def holds(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Tell whether the bytes of `tensor`, which lies in the same storage, are these."""
        offset_bytes, size_bytes = byte_range(tensor)
        return (
            self.start_bytes <= offset_bytes
            and offset_bytes + size_bytes <= self.end_bytes
            and self._version == tensor._version
            # Versions tell something only where both are counted by one counter. Views share their root's. What shares
            # a storage in another way may count for itself, as `x.data` does, and is stored again.
            and self._root() is _root(tensor)
            and self._address == storage.data_ptr()  # not resized since
        )

    def fetch_before(self) -> None:
        """Start to bring what was stored before to the device: a backward pass needs it next. Does not block."""
        if not self._saved.ahead_bytes:
            return
        self._coming = False  # a graph that is retained may need it again
        left_bytes = self._saved.ahead_bytes
        for number in range(self._number - 1, self._number - 1 - _LOOK_BACK, -1):
            before = self._saved.living.get(number)
            if before is None:
                continue
            left_bytes -= before.pages.numel()
            if left_bytes < 0:
                break
            if not before._coming:
                before._coming = True
                before.pages.prefetch()

    def view(self, tensor: torch.Tensor) -> PagedTensor:
        """Return the paged tensor that has the geometry and the bytes of `tensor`."""
        offset = int(tensor.storage_offset()) - self.start_bytes // tensor.itemsize
        return PagedTensor._view(self.pages, tensor, offset)


class Saved:
    """What one pager holds for backward passes.

    Safe to use from several threads. No lock is held while anything waits for pages: two threads that save one tensor
    at the same moment store it twice.
    """

    def __init__(self, device_bytes: int, policy: str) -> None:
        # Policy `lookahead` fetches by itself, and what it did not choose upsets its plan: a fifth more was read.
        self.ahead_bytes = device_bytes // _AHEAD_PARTS if policy == "lru" else 0
        self.stored_bytes = 0  # copied into pages since the start or the last reset
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self.living: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._by_storage: dict[int, list[weakref.ref[Stored]]] = {}  # by the storage's address
        self._sweep_at = 64  # entries of the table, at which dead ones are removed

    @property
    def held_bytes(self) -> int:
        """Bytes in pages at this moment."""
        return sum(stored.pages.numel() for stored in list(self.living.values()))

    def find(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Stored | None:
        """Return what holds the bytes of `tensor` already."""
        for reference in list(self._by_storage.get(storage._cdata, ())):
            stored = reference()
            if stored is not None and stored.holds(tensor, storage):
                return stored
        return None

    def store(self, runtime: Runtime, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Stored:
        """Copy the bytes that a plain strided tensor touches into pages. Blocks until they are there.

        Raises
        ------
        TierFull, OutOfFrames
            There is no room for them. Nothing is kept.
        """
        start_bytes, end_bytes = _range(tensor, storage)
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        source.set_(storage, start_bytes, (end_bytes - start_bytes,), (1,))
        try:
            pages = PagedTensor._page(runtime, source)
        except (TierFull, OutOfFrames) as error:
            # Its frames hold the pages that were reserved, and whoever catches it may need their room.
            raise _no_room(tensor, error) from error.with_traceback(None)
        with self._lock:
            stored = Stored(self, next(self._numbers), tensor, storage, start_bytes, pages)
            self.stored_bytes += end_bytes - start_bytes
            self.living[stored._number] = stored
            self._by_storage.setdefault(storage._cdata, []).append(weakref.ref(stored))
            if len(self._by_storage) >= self._sweep_at:
                self._sweep()
        return stored

    def _sweep(self) -> None:
        """Remove what nobody holds any more, at a cost that is spread over as many calls of `store`."""
        self._by_storage = {
            key: living
            for key, references in self._by_storage.items()
            if (living := [reference for reference in references if reference() is not None])
        }
        self._sweep_at = max(64, 2 * len(self._by_storage))


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view was made from in the end: the owner of the version counter they share."""
    base = tensor._base
    return tensor if base is None else base


def _range(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """Choose the bytes of a storage to store for a tensor: those that it touches, first to last.

    A tensor that touches three quarters of its storage and more takes all of it: other views of the storage are then
    stored with it, as queries, keys and values are that lie between each other.
    """
    offset_bytes, size_bytes = byte_range(tensor)
    whole_bytes = storage.nbytes()
    if 4 * size_bytes >= 3 * whole_bytes:
        return 0, whole_bytes
    return offset_bytes // _ALIGN_BYTES * _ALIGN_BYTES, offset_bytes + size_bytes


def _no_room(tensor: torch.Tensor, error: TierFull | OutOfFrames) -> TierFull | OutOfFrames:
    explained = type(error)(
        f"no room for what autograd saves of {describe(tensor)}: {error}; or train with a smaller batch, or with "
        "torch.utils.checkpoint, or leave tensors of this size plain by pager.activations(min_bytes=...)"
    )
    if isinstance(error, OutOfFrames) and isinstance(explained, OutOfFrames):
        explained.needed_bytes, explained.unpinned_bytes = error.needed_bytes, error.unpinned_bytes
        explained.capacity_bytes = error.capacity_bytes
    return explained
