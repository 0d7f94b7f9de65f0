# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own operator database to its full breadth: dtypes, strides, gradients, evicted operands, a tight device.

    make test-slow PYTEST_ARGS=tests/slow/test_op_db_whole.py

Each operator runs with every sample of `op_db`, contiguous and not, in five dtypes. Every paged operand is evicted
before the call, and the device tier holds the largest sample and a few pages more. Outputs and gradients have the
bytes that plain operands give, but for the operators that are named below with the reason.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

import pagert
from pagert.tensor import PagedTensor

pytestmark = pytest.mark.slow

PAGE = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
SPARE_PAGES = 16  # beside the operands of the largest sample: gradients, and what factories make

# Contents that PyTorch does not define: compared by shape and dtype.
UNDEFINED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip

WITH_VECTORS = "PyTorch asks LAPACK for the vectors too when the operand is of any tensor subclass"
UNSTABLE = "differs from run to run in plain PyTorch as well"
FOLDED = "PyTorch makes one product of a batch where an operand is of any tensor subclass, and a batch of plain ones"
OTHER_FORMULA = "PyTorch takes another formula for the gradient of any tensor subclass"
# Close by torch.testing's tolerance, not bitwise equal.
CLOSE = {
    "linalg.cond": WITH_VECTORS,
    "linalg.eigvalsh": WITH_VECTORS,
    "linalg.matrix_norm": WITH_VECTORS,
    "linalg.norm": WITH_VECTORS,
    "linalg.svdvals": WITH_VECTORS,
    "norm.nuc": WITH_VECTORS,
    "linalg.lstsq": UNSTABLE,
    "linalg.lstsq.grad_oriented": UNSTABLE,
    "linalg.pinv": WITH_VECTORS,
    "linalg.pinv.hermitian": WITH_VECTORS,
    "linalg.matrix_rank": WITH_VECTORS,
    "linalg.matrix_rank.hermitian": WITH_VECTORS,
    "matmul": FOLDED,
    "__rmatmul__": FOLDED,
    "masked.prod": OTHER_FORMULA,
    "masked_fill": OTHER_FORMULA,
    "prod": OTHER_FORMULA,
}
# Plain PyTorch refuses some samples that paged operands are computed for.
ACCEPTED = {
    "as_strided_scatter": "PyTorch refuses strided operands that require a gradient; dense views require none",
}
# Cannot run on paged operands: raises, with the reason.
REFUSED = {
    "tensor_split": "reads the address of its index tensor above the dispatch",
}


def page_of(pager, tensor):
    """Page a tensor with its whole storage, so that its strides and its offset are kept."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor
    if tensor.numel() == 0:
        return pager.tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    paged = PagedTensor._view(pager.tensor(whole), tensor.detach(), tensor.storage_offset())
    return paged.detach().requires_grad_(tensor.requires_grad)


def bytes_of(tensor):
    tensor = tensor.detach()
    if type(tensor) is PagedTensor:
        tensor = tensor.clone()
        tensor = torch.empty_like(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)).copy_(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def same(one, other, what, contents, close):
    assert one.shape == other.shape and one.dtype == other.dtype, what
    if contents and close:
        torch.testing.assert_close(torch.clone(one.detach()), other.detach(), msg=what)
    elif contents and bytes_of(one) != bytes_of(other):
        # A NaN may have any payload; everything else is compared bit for bit.
        left = torch.zeros(other.shape, dtype=other.dtype).copy_(one.detach())
        right = other.detach()
        nan = left.isnan() & right.isnan()
        assert torch.equal(left.masked_fill(nan, 0), right.masked_fill(nan, 0)), what


def operands_of(sample):
    return (sample.input, sample.args, sample.kwargs)


def call(op, operands):
    torch.manual_seed(1)
    return op(operands[0], *operands[1], **operands[2])


def gradients(operands, result, with_grad):
    """Gradients of every operand that requires one, for fixed cotangents of every output that has a graph."""
    outputs = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.requires_grad]
    inputs = [one for one in with_grad if one.requires_grad]
    if not outputs or not inputs:
        return []
    generator = torch.Generator().manual_seed(2)
    cotangents = [
        torch.randn(one.shape, dtype=torch.float64, generator=generator).to(one.dtype) for one in outputs
    ]
    return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)


def samples_of(op, dtype, with_grad):
    for sample in op.sample_inputs("cpu", dtype, requires_grad=with_grad):
        yield "contiguous", sample
        try:
            strided = sample.noncontiguous()
        except Exception:  # what cannot be made so for want of elements or dimensions
            continue
        yield "strided", strided


def device_bytes(samples):
    largest = 0
    for _, sample in samples:
        pages = 0
        for tensor in tree_leaves(operands_of(sample)):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                pages += -(-tensor.untyped_storage().nbytes() // PAGE)
        largest = max(largest, pages)
    return (largest + SPARE_PAGES) * PAGE


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("op", op_db, ids=lambda op: op.full_name)
def test_outputs_and_gradients_of_evicted_operands_are_those_of_plain_ones(op, dtype):
    if dtype not in op.dtypes:
        pytest.skip("PyTorch has no CPU kernel for it")
    if op.full_name in REFUSED:
        pytest.skip(REFUSED[op.full_name])
    with_grad = op.supports_autograd and dtype in op.backward_dtypes and dtype.is_floating_point
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    samples = list(samples_of(op, dtype, with_grad))
    close = op.full_name in CLOSE
    contents = op.name not in UNDEFINED
    with pagert.Pager(
        device="cpu", device_bytes=device_bytes(samples), host_bytes="256MiB", page_bytes=PAGE
    ) as pager:
        for index, (kind, sample) in enumerate(samples):
            plain = operands_of(sample)
            what = f"{op.full_name} {dtype} {kind} sample {index}: {sample}"
            paged = tree_map_only(torch.Tensor, lambda tensor: page_of(pager, tensor), plain)
            for tensor in tree_leaves(paged):
                if type(tensor) is PagedTensor:
                    tensor.evict()
            plain_leaves, _ = tree_flatten(plain)
            paged_leaves, _ = tree_flatten(paged)
            try:
                expected = call(op, plain)
            except Exception as error:
                if op.full_name not in ACCEPTED:
                    with pytest.raises(type(error)):
                        call(op, paged)
                continue
            result = call(op, paged)
            left, right = tree_leaves(result), tree_leaves(expected)
            assert len(left) == len(right), what
            for one, other in zip(left, right, strict=True):
                if isinstance(other, torch.Tensor):
                    same(one, other, what, contents, close)
                else:
                    assert one == other or (one != one and other != other), what
            if not with_grad:
                continue
            tensors = [one for one in plain_leaves if isinstance(one, torch.Tensor)]
            theirs = [one for one in paged_leaves if isinstance(one, torch.Tensor)]
            try:
                expected_grads = gradients(plain, expected, tensors)
            except RuntimeError as error:
                with pytest.raises(type(error)):
                    gradients(paged, result, theirs)
                continue
            grads = gradients(paged, result, theirs)
            assert len(grads) == len(expected_grads), what
            for one, other in zip(grads, expected_grads, strict=True):
                assert (one is None) == (other is None), what
                if other is not None:
                    same(one, other, f"gradient of {what}", contents, close)
