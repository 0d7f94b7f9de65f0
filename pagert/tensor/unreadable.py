# SPDX-License-Identifier: Apache-2.0
"""A storage without memory, whose every reader gets an exception and never address 0.

PyTorch exchanges what a plain tensor is made of without asking: after `plain.data = paged` its readers
look at the storage of the paged tensor. Writers are refused by a flag of the storage that Python can
set. For readers there is another flag beside it, for which only some builds of PyTorch have a function.
Where this one has none, the flag's place is found by watching where its neighbours change in a storage
made for that, and it is used only if readers of that storage are then refused.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch

__all__ = ["refuse_addresses"]

_SIZE_BYTES = 80  # of a storage's record that are looked at; it is larger in every build
_MESSAGE = (
    "this plain tensor was given the bytes of a paged tensor by `plain.data = paged`, and they have no "
    "address: use `torch.nn.Parameter(pager.tensor(x))` or Pager.page_ for a paged parameter"
)
_refuse_readers: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)


def refuse_addresses(tensor: torch.Tensor, refuse_readers: bool) -> None:
    """Let whoever asks for the address of the tensor's storage get an exception: writers, and readers where asked to.

    Readers in C++ are also those that compare two storages (`is_alias_of`), as `DistributedDataParallel` does with
    every gradient: gradients refuse writers alone.
    """
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    if not refuse_readers:
        return
    address = torch._C.TensorBase.untyped_storage(tensor)._cdata
    if _refuse_readers is not None:
        _refuse_readers(address, _MESSAGE)
    elif _flag_offset:
        ctypes.c_bool.from_address(address + _flag_offset).value = True


def _record(address: int) -> bytes:
    return bytes((ctypes.c_uint8 * _SIZE_BYTES).from_address(address))


def _find_flag() -> int:
    """Return where the readers' flag lies in a storage's record, or 0 where that cannot be made sure of.

    It lies between the writers' flag and the one that warns writers.
    """
    probe = torch.empty(3)
    storage = probe.untyped_storage()
    records = [_record(storage._cdata)]
    for change in (
        torch._C._set_throw_on_mutable_data_ptr,
        torch._C._set_warn_deprecated_on_mutable_data_ptr,
    ):
        change(probe)
        records.append(_record(storage._cdata))
    changed = [
        [at for at in range(_SIZE_BYTES) if before[at] != after[at]]
        for before, after in itertools.pairwise(records)
    ]
    if len(changed[0]) != 2 or changed[1] != [changed[0][1] + 2]:
        return 0
    offset = changed[0][1] + 1
    flag = ctypes.c_bool.from_address(storage._cdata + offset)
    if records[0][offset]:
        return 0
    flag.value = True
    try:
        probe.clone()
    except RuntimeError:
        return offset
    flag.value = False
    return 0


_flag_offset = 0 if _refuse_readers is not None else _find_flag()
