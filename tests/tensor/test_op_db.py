# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own operator database: paged operands give the bytes that plain ones give."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

from pagert.tensor import PagedTensor

# Contents that PyTorch does not define: compared by shape and dtype.
UNDEFINED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

# Not bitwise equal, only close.
WITH_VECTORS = "PyTorch asks LAPACK for the vectors too when the operand is of any tensor subclass"
FOLDED = "PyTorch makes one product of a batch where an operand is of any tensor subclass, and a batch of plain ones"
UNSTABLE = "the gelsy driver differs from run to run in plain PyTorch as well"
CLOSE = {
    "linalg.cond": WITH_VECTORS,
    "linalg.eigvalsh": WITH_VECTORS,
    "linalg.matrix_norm": WITH_VECTORS,
    "linalg.norm": WITH_VECTORS,
    "linalg.svdvals": WITH_VECTORS,
    "norm.nuc": WITH_VECTORS,
    "matmul": FOLDED,
    "__rmatmul__": FOLDED,
    "linalg.lstsq": UNSTABLE,
    "linalg.lstsq.grad_oriented": UNSTABLE,
}

# Cannot run on paged operands: raises, with the reason.
REFUSED = {
    "tensor_split": (RuntimeError, "reads the address of its index tensor above the dispatch"),
}


def page(pager, tensor):
    """Page a tensor with its whole storage, so that its strides and its offset are kept."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.numel() == 0:
        return pager.tensor(tensor) if tensor.layout is torch.strided else tensor
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    return PagedTensor._view(pager.tensor(whole), tensor.detach(), tensor.storage_offset())


def as_bytes(tensor):
    tensor = tensor.detach()
    if type(tensor) is PagedTensor:
        with tensor.resident("read") as dense:
            return as_bytes(dense)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def compare(paged, plain, what, contents=True, close=False):
    left, right = tree_leaves(paged), tree_leaves(plain)
    assert len(left) == len(right), what
    for one, other in zip(left, right, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.shape == other.shape and one.dtype == other.dtype, what
            assert one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg(), what
            if contents and close:
                torch.testing.assert_close(torch.clone(one), other, msg=what)
            elif contents:
                assert as_bytes(one) == as_bytes(other), what
                if other.layout is torch.strided:
                    assert one.stride() == other.stride(), what
        else:
            assert one == other or (one != one and other != other), what


@pytest.mark.parametrize("make_pager", ["fake", "host"], indirect=True)
@pytest.mark.parametrize("op", op_db, ids=lambda op: op.full_name)
def test_op_db_forward_is_bitwise_equal(op, make_pager):
    if not op.dtypes:
        pytest.skip("PyTorch has no CPU kernel for it")
    dtype = torch.float32 if torch.float32 in op.dtypes else min(op.dtypes, key=str)
    torch.manual_seed(0)
    pager = make_pager(24 << 20, seed=1)
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
        plain = (sample.input, sample.args, sample.kwargs)
        paged = tree_map_only(torch.Tensor, lambda tensor: page(pager, tensor), plain)
        what = f"{op.full_name} sample {index}: {sample}"
        try:
            expected = run(op, plain)
        except Exception as error:
            with pytest.raises(type(error)):
                run(op, paged)
            continue
        try:
            result = run(op, paged)
        except Exception as error:
            kind, _ = REFUSED.get(op.full_name, (None, ""))
            if kind is None or not isinstance(error, kind):
                raise
            continue
        compare(result, expected, what, op.name not in UNDEFINED, op.full_name in CLOSE)
        compare(paged, plain, f"operands after {what}")


def run(op, operands):
    torch.manual_seed(1)
    return op(operands[0], *operands[1], **operands[2])
