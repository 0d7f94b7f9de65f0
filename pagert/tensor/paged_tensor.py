# SPDX-License-Identifier: Apache-2.0
"""The tensor whose bytes lie in pages, as users hold it.

Autograd, version counters and views are PyTorch's own; operators arrive in `__torch_dispatch__`, which is the
dispatcher's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch

from pagert._core.pump import READ, UPDATE
from pagert.errors import PagerClosed, UnsupportedOperator, UnsupportedTensor
from pagert.geometry import byte_range

from . import copying, gradients, persistence, remaking, sharing
from .dispatch import make_dispatcher
from .region_tensor import RegionTensor
from .resident import Resident
from .storage import PagedStorage

if TYPE_CHECKING:
    import numpy

    from pagert.runtime import Runtime

__all__ = ["PagedTensor", "Resident"]

# PyTorch's own attributes, below the properties of the same names.
_DATA: Any = torch._C.TensorBase.data
_GRAD: Any = torch._C.TensorBase.grad
_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad

_TIERS = ("zero", "device", "host", "flash")


class PagedTensor(RegionTensor):
    """A tensor whose bytes lie in the pages of a pager.

    It is made by `Pager.tensor`, `Pager.empty`, `Pager.zeros`, `Pager.full` and `Pager.page_`, by
    every view of a paged tensor and by every factory after its model (`zeros_like`, `clone`, ...).
    Its shape, strides, dtype and device are always the full ones, wherever its bytes are; `device`
    is the device that computes.

    A plain tensor does not become paged by `plain.data = paged`: PyTorch exchanges what the plain
    one is made of without asking, and its next reader gets an exception. Make a new parameter,
    `module.weight = torch.nn.Parameter(pager.tensor(x))`, or use `Pager.page_`.

    Results of other operators are plain tensors. Whatever needs a raw address (`data_ptr`, `numpy`,
    DLPack) is refused by name; `resident` gives a plain tensor for such code.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # Construction.

    def __new__(  # type: ignore[misc]
        cls, data: Any = None, requires_grad: bool | None = None, **attributes: Any
    ) -> torch.Tensor:
        """Make another tensor of `data`, as `type(p)(data, requires_grad=...)` asks for it.

        Parameters
        ----------
        data : torch.Tensor
            Its bytes are shared, not copied.
        requires_grad : bool, optional
            Given, the result is a Parameter, as with `torch.nn.Parameter(data, requires_grad)`.
        attributes
            Of the result. Those of a paged tensor, `**p.__dict__`, name its pager and whether it is
            a parameter; where its bytes lie is left out.

        Returns
        -------
        torch.Tensor
            Paged where `data` is, or where the attributes name a pager: then a plain `data` becomes
            paged in place. Plain otherwise, because no pager is known: `Pager.page_` pages it.
        """
        return remaking.remake(cls, data, requires_grad, attributes)

    @classmethod
    def _page(
        cls, runtime: Runtime, source: torch.Tensor, dtype: torch.dtype | None = None
    ) -> PagedTensor:
        """Return a paged copy of a strided tensor. Dense layouts are kept."""
        return cast(PagedTensor, copying.page(cls, runtime, source, dtype))

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

        Assigning rebinds to the bytes of another tensor. A plain one becomes paged in place, with
        whatever else looks at its bytes: both are one, as among plain tensors.
        """
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"data must be a tensor, not {type(value).__name__}")
        if type(value) is not PagedTensor:
            value = sharing.page_with_others(
                PagedTensor, self._runtime, "data", check_wrappable(value)
            )
        self._rebind(value)

    def set_(self, *arguments: Any, **options: Any) -> PagedTensor:  # type: ignore[override]
        """Become another look at the bytes of another tensor, in place.

        A plain source becomes paged in place, with what else looks at its bytes. A storage as the
        source is refused by name.
        """
        source = options.get("source", arguments[0] if arguments else None)
        if isinstance(source, torch.Tensor) and type(source) is not PagedTensor:
            paged = sharing.page_with_others(
                PagedTensor, self._runtime, "the source of set_", check_wrappable(source)
            )
            arguments, options = (paged, *arguments[1:]), {**options}
            options.pop("source", None)
        super().set_(*arguments, **options)
        return self

    def _set_grad(self, value: torch.Tensor | None) -> None:
        if type(value) is torch.Tensor and self.grad is not value and sharing.is_ordinary(value):
            # It would be replaced by a paged one after the next backward pass, and its user's hold
            # on it, or on the buffer that it is a part of, would be lost.
            sharing.page_with_others(PagedTensor, self._runtime, "grad", value)
        _GRAD.__set__(self, value)

    grad = property(
        _GRAD.__get__,
        _set_grad,
        _GRAD.__delete__,
        """The gradient. A plain one that is assigned becomes paged in place.""",
    )

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
            "give; use `with t.resident() as dense:` and take it from the plain tensor inside, and "
            "pagert.save or torch.save to write files"
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
