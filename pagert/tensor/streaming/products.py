# SPDX-License-Identifier: Apache-2.0
"""Matrix products, by blocks of the rows of the large operand.

A block of the result needs whole rows of one operand and whole columns of the other, so that each element is added up
over the same terms. Where the operand lies the other way (the gradient of a head's logits, of which a block of columns
is needed), only the pages of these columns are fetched, into a plain copy. Where even that does not do, because the
terms of the sum themselves lie along the large axis of both operands, the sum is cut and added up block by block.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ranges import ROUND_LENGTHS, cut, rounded
from .call import Call, major_axis

__all__ = ["NAMES", "run"]

NAMES = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"})
# A kernel for one vector adds up in another order than one for matrices, so no block is of one row or column. MKL adds
# up a product in blocks of 384 terms, the last two alike: sums that are cut at such multiples come out the same.
TERMS_ROUND = 768
_HALVES = frozenset({torch.bfloat16, torch.float16})


def run(call: Call) -> Any:
    """Run the call by blocks. Blocks until all have run."""
    base = call.traits.name.split(".")[1]
    values = call.named()
    if call.traits.name != f"aten.{base}.default":
        raise call.refuse("this overload is not one of those that run block by block")
    if base in ("bmm", "baddbmm"):
        return _batches(call, base, values)
    if base in ("mv", "addmv"):
        left, right = values["self" if base == "mv" else "mat"], values["vec"].unsqueeze(1)
        added = None if base == "mv" else values["self"].unsqueeze(1)
        return _Product(call, left, right, added, values).run().squeeze(1)
    if base == "mm":
        return _Product(call, values["self"], values["mat2"], None, values).run()
    return _Product(call, values["mat1"], values["mat2"], values["self"], values).run()


def _batches(call: Call, base: str, values: dict[str, Any]) -> Any:
    left, right = ("self", "mat2") if base == "bmm" else ("batch1", "batch2")
    length = values[left].size(0)
    if length == 1:
        added = None if base == "bmm" else values["self"].expand(1, values[left].size(1), values[right].size(2))[0]
        return _Product(call, values[left][0], values[right][0], added, values).run().unsqueeze(0)
    cuts = (left, right) if base == "bmm" else (left, right, "self")

    def narrowed(start: int, stop: int) -> dict[str, Any]:
        return {
            name: values[name].narrow(0, start, stop - start)
            for name in cuts
            if values[name].dim() == 3 and values[name].size(0) > 1
        }

    step = call.step(length, lambda step: call.pages_bytes(list(narrowed(0, step).values())))
    size = (length, values[left].size(1), values[right].size(2))
    result = call.result(size, values[left].dtype)
    for start, stop in cut(length, step):
        given = values | narrowed(start, stop)
        schema = call.traits.op._schema.arguments
        part = call.traits.op(
            *[given[one.name] for one in schema if not one.kwarg_only],
            **{one.name: given[one.name] for one in schema if one.kwarg_only},
        )
        call.place(result[start:stop], part)
    return result


class _Product:
    """beta * added + alpha * (left @ right), with `left` (rows, terms) and `right` (terms, columns)."""

    def __init__(
        self, call: Call, left: torch.Tensor, right: torch.Tensor, added: torch.Tensor | None, values: dict[str, Any]
    ) -> None:
        self.call = call
        self.left, self.right, self.added = left, right, added
        self.alpha, self.beta = values.get("alpha", 1), values.get("beta", 1)
        self.row_count, self.term_count = left.shape
        self.column_count = right.size(1)

    def run(self) -> torch.Tensor:
        rows, columns = self._step(self.left, 0), self._step(self.right, 1)
        if rows is None or columns is None:
            return self._run_by_terms()
        result = self.call.result((self.row_count, self.column_count), self.left.dtype)
        item_bytes = self.left.itemsize
        # A block of the result is plain memory until it is in its place.
        limit = max(1, self.call.block_bytes // item_bytes)
        if self._is_large(self.left) and not self._is_large(self.right):
            rows = rounded(min(rows, max(1, limit // columns)))
        else:
            columns = rounded(min(columns, max(1, limit // min(rows, self.row_count))))
            if columns < min(ROUND_LENGTHS[0], self.column_count):
                columns = min(ROUND_LENGTHS[0], self.column_count)
                rows = rounded(max(1, limit // columns))
        for start, stop in cut(self.row_count, rows, 2):
            left = self._tile(self.left, 0, start, stop)
            for first, last in cut(self.column_count, columns, 2):
                right = self._tile(self.right, 1, first, last)
                added = self._added(start, stop, first, last)
                if added is None:
                    part = torch.mm(left, right)
                else:
                    part = torch.addmm(added, left, right, beta=self.beta, alpha=self.alpha)
                self.call.place(result[start:stop, first:last], part)
        return result

    def _is_large(self, tensor: torch.Tensor) -> bool:
        return self.call.is_large(tensor)

    def _step(self, tensor: torch.Tensor, axis: int) -> int | None:
        """Return how long blocks along an axis that stays may be. None where such blocks would be too scattered."""
        length = tensor.size(axis)
        if not self._is_large(tensor):
            return length
        step = max(1, self.call.block_bytes // (self.term_count * tensor.itemsize))
        step = rounded(min(length, step))
        if major_axis(tensor) == axis:
            page_bytes = self.call.runtime.page_bytes
            fits = self.term_count * tensor.itemsize + 2 * page_bytes <= self.call.runtime.storage.nbytes() // 2
            return step if fits else None
        return step if step * tensor.itemsize >= self.call.runtime.page_bytes or step == length else None

    def _tile(self, tensor: torch.Tensor, axis: int, start: int, stop: int) -> torch.Tensor:
        """Return a block of an operand: a view, or a plain copy of what lies scattered."""
        view = tensor.narrow(axis, start, stop - start)
        if not self._is_large(tensor) or major_axis(tensor) == axis:
            return view
        return self.call.copied(view)

    def _added(self, start: int, stop: int, first: int, last: int) -> torch.Tensor | None:
        if self.added is None:
            return None
        added = self.added
        if added.dim() == 2 and added.size(0) > 1:
            added = added[start:stop]
        if added.dim() >= 1 and added.size(-1) > 1:
            added = added[..., first:last]
        return added

    def _run_by_terms(self) -> torch.Tensor:
        """Cut the sum: blocks of terms, added up in their order, in blocks of the result's rows."""
        call, item_bytes = self.call, self.left.itemsize
        result = call.result((self.row_count, self.column_count), self.left.dtype)
        rows = min(self.row_count, max(1, call.block_bytes // max(1, self.column_count * item_bytes)))
        terms = max(1, call.block_bytes // (max(rows, self.column_count) * item_bytes))
        least = min(TERMS_ROUND, self.term_count)
        if terms < least and least * (rows + self.column_count) * item_bytes <= call.runtime.storage.nbytes() // 2:
            terms = least
        if terms > TERMS_ROUND:
            terms = terms // TERMS_ROUND * TERMS_ROUND
        for start, stop in cut(self.row_count, rows, 2):
            total = self._total(start, stop)
            for index, (first, last) in enumerate(cut(self.term_count, terms)):
                left = call.near(self.left[start:stop, first:last])
                right = call.near(self.right[first:last])
                beta = self.beta if index == 0 else 1
                total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta, alpha=self.alpha)
            call.place(result[start:stop], total.to(self.left.dtype))
        return result

    def _total(self, start: int, stop: int) -> torch.Tensor:
        """Return what the blocks are added to: sums of half precision are kept in single precision."""
        dtype = torch.float32 if self.left.dtype in _HALVES else self.left.dtype
        total = torch.zeros((stop - start, self.column_count), dtype=dtype, device=self.call.runtime.device)
        added = self._added(start, stop, 0, self.column_count)
        return total if added is None else total.copy_(added)

