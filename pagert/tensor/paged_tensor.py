# SPDX-License-Identifier: Apache-2.0
"""The tensor whose bytes lie in pages.

A `PagedTensor` is a tensor over a storage that has a size and no memory. The storage stands for a
region of the pager's address space: all views of one region share it, as views of a plain tensor
share theirs. Autograd, version counters and views are PyTorch's own; operators arrive in
`__torch_dispatch__`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch

from pagert._core.pump import READ, UPDATE
from pagert.errors import PagerClosed, UnsupportedOperator, UnsupportedTensor
from pagert.geometry import byte_range, contiguous_stride, describe, extent, fills_range

from . import copying, gradients, persistence
from .dispatch import make_dispatcher
from .lending import Loan, export_by_aliases, take_back
from .operands import Operands
from .storage import PagedStorage

if TYPE_CHECKING:
    import numpy

    from pagert._core.operation import Dispatcher, Footprint
    from pagert._core.pump import Region
    from pagert.runtime import Runtime

__all__ = ["PagedTensor", "Resident"]

# PyTorch's own attributes, below the properties of the same names.
_DATA: Any = torch._C.TensorBase.data
_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad

_TIERS = ("zero", "device", "host", "flash")


class Resident:
    """Context in which a paged tensor is held on the device, seen as a plain dense tensor."""

    __slots__ = ("_dense", "_loan", "_mode", "_tensor")

    def __init__(self, tensor: PagedTensor, mode: int) -> None:
        self._tensor = tensor
        self._mode = mode
        self._loan: Loan | None = None
        self._dense: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        if self._loan is not None:
            raise RuntimeError("this resident() context is open already; ask for another one")
        operands = Operands(PagedTensor, "resident")
        operands.add(self._tensor, self._mode, guarded=True)
        operands.pin()
        self._loan = loan = Loan(operands)
        self._dense = export_by_aliases(loan.lend(operands.dense(self._tensor)))
        return self._dense

    def __exit__(self, *exception: object) -> None:
        if self._loan is None or self._dense is None:
            return
        loan, dense = weakref.ref(self._loan), self._dense
        self._loan = self._dense = None
        take_back(dense)
        if loan() is not None:
            warnings.warn(
                "a view, an array, an export or a graph of the plain tensor that resident() lent for "
                f"{describe(self._tensor)} is still alive after the context: its pages stay pinned on "
                "the device until it is gone; clone what should outlive the context",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._mode == UPDATE:
            torch.autograd.graph.increment_version(self._tensor)


class PagedTensor(torch.Tensor):
    """A tensor whose bytes lie in the pages of a pager.

    It is made by `Pager.tensor`, `Pager.empty`, `Pager.zeros`, `Pager.full` and `Pager.page_`, by
    every view of a paged tensor and by every factory after its model (`zeros_like`, `clone`, ...).
    Its shape, strides, dtype and device are always the full ones, wherever its bytes are; `device`
    is the device that computes.

    A plain tensor does not become paged by `plain.data = paged`: PyTorch exchanges what the plain
    one is made of without asking, and its next reader would find no memory. Make a new parameter,
    `module.weight = torch.nn.Parameter(pager.tensor(x))`, or use `Pager.page_`.

    Results of other operators are plain tensors. Whatever needs a raw address (`data_ptr`, `numpy`,
    DLPack) is refused by name; `resident` gives a plain tensor for such code.
    """

    _region: Region | None  # None: no bytes
    _runtime: Runtime
    _footprint: Footprint | None = None  # its bytes in the region; of this geometry only
    _dispatcher: ClassVar[Dispatcher]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # Construction.

    @classmethod
    def _reserve(
        cls, runtime: Runtime, size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype
    ) -> PagedTensor:
        """Reserve a region and return the tensor that covers it. Its pages are zero."""
        if stride is None:
            stride = contiguous_stride(size)
        size_bytes = extent(size, stride) * dtype.itemsize
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=dtype, device=runtime.device
        )
        tensor._region = runtime.pump.reserve(size_bytes) if size_bytes else None
        tensor._runtime = runtime
        if size_bytes:
            torch._C._set_throw_on_mutable_data_ptr(
                tensor
            )  # C++ code gets an exception, never address 0
        return tensor

    @classmethod
    def _wrap(cls, geometry: torch.Tensor, region: Region | None, runtime: Runtime) -> PagedTensor:
        """Return a paged tensor of the geometry of `geometry`, which shares a region's storage."""
        tensor = torch.Tensor._make_subclass(cls, geometry)
        tensor._region = region
        tensor._runtime = runtime
        return tensor

    @classmethod
    def _view(cls, owner: PagedTensor, like: torch.Tensor, offset: int) -> PagedTensor:
        """Return a view of the owner's region at element `offset`, with the geometry of `like`."""
        geometry = torch.empty(0, dtype=like.dtype, device=owner.device)
        geometry.set_(
            torch._C.TensorBase.untyped_storage(owner),
            offset,
            like.size(),
            like.stride(),
        )
        torch._C._set_neg(geometry, like.is_neg())
        if like.is_complex():
            torch._C._set_conj(geometry, like.is_conj())
        return cls._wrap(geometry, owner._region, owner._runtime)

    @classmethod
    def _page(
        cls, runtime: Runtime, source: torch.Tensor, dtype: torch.dtype | None = None
    ) -> PagedTensor:
        """Return a paged copy of a strided tensor. Dense layouts are kept."""
        stride = source.stride() if fills_range(source) else None
        target = cls._reserve(runtime, source.size(), stride, dtype or source.dtype)
        if target._region is not None:
            if source.requires_grad:
                source = source.detach()
            copying.copy(cls, target, source, overwrite=True, name="pagert.tensor")
        return target

    def _rebind(self, other: PagedTensor) -> None:
        """Become another look at the bytes of `other`. The object, history and version stay."""
        _DATA.__set__(self, other)
        self._region = other._region
        self._runtime = other._runtime
        self._footprint = None

    # Residency.

    def resident(self, mode: Literal["update", "read"] = "update") -> Resident:
        """Hold the tensor on the device and lend it as a plain dense tensor.

        Parameters
        ----------
        mode : {"update", "read"}
            "read" promises that nothing is written to the plain tensor, so that its pages stay
            clean.

        Returns
        -------
        Resident
            A context manager. Entering blocks until the bytes are on the device. The plain tensor
            is valid inside the context only; afterwards it is empty. What was made of it and
            outlives the context (a view, a NumPy array, a DLPack export, a graph) is reported by a
            `RuntimeWarning` and keeps the pages pinned while it lives; a bare address does not.

        Raises
        ------
        OutOfFrames
            When entered: the tensor does not fit the device tier beside what is pinned.
        """
        modes = {"update": UPDATE, "read": READ}
        if mode not in modes:
            raise ValueError(f"resident(mode={mode!r}): the modes are 'update' and 'read'")
        return Resident(self, modes[mode])

    def prefetch(self) -> None:
        """Start to bring the tensor to the device. Does not block."""
        offset_bytes, size_bytes = byte_range(self)
        if self._region is not None and size_bytes:
            self._runtime.pump.prefetch(self._region, offset_bytes, size_bytes)

    def evict(self) -> None:
        """Move the tensor's pages off the device. Blocks until they have left."""
        offset_bytes, size_bytes = byte_range(self)
        if self._region is not None and size_bytes:
            self._runtime.pump.evict(self._region, offset_bytes, size_bytes)

    @property
    def tier(self) -> str:
        """Where the bytes lie:

        "device", "host", "flash", "mixed", or "zero" for pages never written.
        """
        offset_bytes, size_bytes = byte_range(self)
        if self._region is None or size_bytes == 0:
            return "zero"
        counts = self._runtime.pump.locate(self._region, offset_bytes, size_bytes)
        places = [name for name, count in zip(_TIERS, counts, strict=True) if count]
        return places[0] if len(places) == 1 else "mixed"

    # Attributes that PyTorch keeps in C++.

    @property
    def data(self) -> torch.Tensor:
        """The same bytes without history.

        Assigning rebinds to the bytes of another tensor, paged if need be.
        """
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"data must be a tensor, not {type(value).__name__}")
        if type(value) is not PagedTensor:
            value = PagedTensor._page(self._runtime, check_wrappable(value))
        self._rebind(value)

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows this tensor.

        A paged leaf that requires a gradient gets a paged one.
        """
        return _REQUIRES_GRAD.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> PagedTensor:
        """Change whether autograd follows this tensor, in place."""
        _REQUIRES_GRAD.__set__(self, requires_grad)
        gradients.keep_paged(self)
        return self

    # Text. Nothing here touches the bytes.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            place = self.tier
        except PagerClosed:
            place = "closed"
        parts = [f"shape={tuple(self.shape)}", f"dtype={self.dtype}", f"tier={place}"]
        if self.device.type != "cpu":
            parts.append(f"device={self.device}")
        if self.grad_fn is not None:
            parts.append(f"grad_fn=<{self.grad_fn.name()}>")
        elif self.requires_grad:
            parts.append("requires_grad=True")
        text = f"PagedTensor({', '.join(parts)})"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        if format_spec and self.dim() == 0:
            return format(self.item(), format_spec)
        return object.__format__(self, format_spec)

    # Copies and files.

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return persistence.deepcopy(PagedTensor, self, memo)

    def __copy__(self) -> torch.Tensor:
        return persistence.shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return persistence.reduce(PagedTensor, self, protocol)

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers."""
        return copying.load(PagedTensor, self).tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        if copy is False:
            raise ValueError(
                "a paged tensor becomes a NumPy array by a copy only; use np.asarray(t) without "
                "copy=False"
            )
        if _REQUIRES_GRAD.__get__(self):
            raise RuntimeError(
                "a tensor that requires a gradient does not become a NumPy array; use t.detach()"
            )
        array = copying.load(PagedTensor, self).resolve_conj().resolve_neg().cpu().numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    # What would hand out an address. The bytes move, so an address would be wrong sooner or later.

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedOperator(
            f"{what} of a paged tensor: its bytes move between tiers, so there is no address to "
            "give; use `with t.resident() as dense:` and take it from the plain tensor inside"
        )

    def data_ptr(self) -> int:
        """Refuse by name: there is no fixed address."""
        self._refuse("data_ptr()")

    def untyped_storage(self) -> PagedStorage:  # type: ignore[override]
        """Return what says how many bytes this tensor is a view of, and has no memory."""
        return PagedStorage(torch._C.TensorBase.untyped_storage(self))

    def storage(self) -> torch.TypedStorage:
        """Refuse by name: the storage is the pages."""
        self._refuse("storage()")

    def _typed_storage(self) -> torch.TypedStorage:
        self._refuse("storage()")

    def numpy(self, *, force: bool = False) -> numpy.ndarray:
        """Refuse by name unless `force`:

        NumPy would share memory that moves. `force` gives a copy.
        """
        if force:
            return self.detach().__array__()
        raise UnsupportedOperator(
            "numpy() of a paged tensor: the array would share memory that moves between tiers; "
            "use numpy(force=True) or np.asarray(t) for a copy, or resident()"
        )

    def __dlpack__(self, *arguments: Any, **options: Any) -> NoReturn:
        self._refuse("__dlpack__()")

    @property
    def __cuda_array_interface__(self) -> Any:
        if self.device.type == "cpu":
            raise AttributeError("no __cuda_array_interface__: the tensor computes on the CPU")
        self._refuse("__cuda_array_interface__")

    def share_memory_(self) -> NoReturn:
        """Refuse by name: pages belong to this process."""
        raise UnsupportedOperator(
            "share_memory_() of a paged tensor: pages belong to one process; send the tensor "
            "itself, it arrives as a plain one"
        )

    def is_shared(self) -> bool:
        """Return False: pages belong to this process."""
        return False

    def is_pinned(self, device: Any = None) -> bool:
        """Return False: the pages are the pager's, wherever they lie."""
        return False


def check_wrappable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or raise `UnsupportedTensor` with the reason why it cannot be paged."""
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedTensor(f"{kind.__name__} has no shape yet; run the module once before")
    reason = ""
    if tensor.is_nested:
        raise UnsupportedTensor("nested tensors cannot be paged; page their parts")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        reason = f"the layout {layout} cannot be paged; use `.to_dense()`"
    elif tensor.is_quantized:
        reason = "quantized tensors cannot be paged; use `.int_repr()` or `.dequantize()`"
    elif tensor.is_meta:
        reason = "a meta tensor has no bytes; use `pager.empty(t.shape, dtype=t.dtype)`"
    elif kind not in (torch.Tensor, torch.nn.Parameter, PagedTensor) and _has_bytes_of_its_own(
        kind
    ):
        reason = f"{kind.__name__} is a tensor subclass with bytes of its own"
    if reason:
        raise UnsupportedTensor(
            f"tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}: {reason}"
        )
    return tensor


def _has_bytes_of_its_own(kind: type[torch.Tensor]) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


PagedTensor._dispatcher = make_dispatcher(PagedTensor)
# A bound method already: what a class method would be given as `cls` is always PagedTensor.
PagedTensor.__torch_dispatch__ = staticmethod(PagedTensor._dispatcher.dispatch)  # type: ignore
