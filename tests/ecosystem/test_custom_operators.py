# SPDX-License-Identifier: Apache-2.0
"""Operators that others register: nothing that they write is lost, whatever their schema says."""

from __future__ import annotations

import warnings

import pytest
import torch
from stepping import plain, same

from pagert.errors import ForeignTensor, UnsupportedOperator

kept = []


@torch.library.custom_op("pagert_tests::secretly_double", mutates_args=())
def secretly_double(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.sum()


@torch.library.custom_op("pagert_tests::add_to_first", mutates_args=("x",))
def add_to_first(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)
    y.zero_()  # not declared


@torch.library.custom_op("pagert_tests::secretly_scale_list", mutates_args=())
def secretly_scale_list(xs: list[torch.Tensor], factor: float) -> torch.Tensor:
    for x in xs:
        x.mul_(factor)
    return xs[0].sum()


@torch.library.custom_op("pagert_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


cube.register_autograd(
    lambda ctx, gradient: 3 * ctx.saved_tensors[0] ** 2 * gradient,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)

library = torch.library.Library("pagert_tests", "FRAGMENT")
for schema in (
    "tail(Tensor x) -> Tensor",
    "same_object(Tensor x) -> Tensor",
    "keep(Tensor x) -> ()",
    "enlarge(Tensor x) -> ()",
    "transpose(Tensor x) -> ()",
    "exchange(Tensor x) -> ()",
    "fail_late(Tensor x) -> ()",
    "into(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    "look(Tensor(a) x) -> Tensor(a)",
):
    library.define(schema)


def fail_late(x):
    x.fill_(7)
    raise ValueError("too late")


def nothing(_):
    return None


for name, function in {
    "tail": lambda x: x[1:],
    "same_object": lambda x: x,
    "keep": lambda x: kept.append(x.view(-1)[1:]),
    "enlarge": lambda x: nothing(x.resize_(10_000)),
    "transpose": lambda x: nothing(x.t_()),
    "exchange": lambda x: setattr(x, "data", torch.zeros_like(x)),
    "fail_late": fail_late,
    "into": lambda x, out: out.copy_(x + 1),
    "look": lambda x: x.view(-1),
}.items():
    library.impl(name, function, "CPU")
mine = torch.ops.pagert_tests


def pair(pager, *shape):
    values = torch.randn(shape)
    return values.clone(), pager.tensor(values)


def test_undeclared_writes_to_a_clean_tensor_stay(pager):
    one, other = pair(pager, 40, 50)
    other.evict()
    assert same(secretly_double(one), secretly_double(other))
    other.evict()
    assert same(one, other)


def test_undeclared_writes_to_several_operands_and_to_lists_stay(pager):
    (one, other), (more, also) = pair(pager, 40, 50), pair(pager, 40, 50)
    for paged in (other, also):
        paged.evict()
    add_to_first(one, more)
    add_to_first(other, also)
    for paged in (other, also):
        paged.evict()
    assert same(one, other) and same(more, also)
    third, fourth = pair(pager, 7)
    assert same(
        secretly_scale_list([one, torch.ones(3), third], 3.0),
        secretly_scale_list([other, torch.ones(3), fourth], 3.0),
    )
    for paged in (other, fourth):
        paged.evict()
    assert same(one, other) and same(third, fourth)


def test_undeclared_writes_through_views_of_one_region_stay(pager):
    one, other = pair(pager, 60, 50)
    other.evict()
    add_to_first(one[:40, 3:9], one[20:, 3:9])
    add_to_first(other[:40, 3:9], other[20:, 3:9])
    other.evict()
    assert same(one, other)


def test_registered_gradients_are_those_of_plain_tensors(pager):
    one, other = pair(pager, 40, 50)
    one.requires_grad_()
    other.requires_grad_()
    for tensor in (one, other):
        cube(tensor).sum().backward()
    other.grad.evict()
    assert same(one.grad, other.grad)


def test_what_was_written_before_an_error_stays(pager):
    _, other = pair(pager, 40, 50)
    other.evict()
    with pytest.raises(ValueError, match="too late"):
        mine.fail_late(other)
    other.evict()
    assert (plain(other) == 7).all()


def test_undeclared_aliases_leave_as_paged_views(pager):
    one, other = pair(pager, 40, 50)
    tail = mine.tail(other)
    assert mine.same_object(other) is other
    look = mine.look(other)
    other.evict()
    assert type(tail) is type(other) and same(one[1:], tail) and same(one.view(-1), look)
    tail.zero_()
    other.evict()
    assert (plain(other)[1:] == 0).all() and same(one[0], other[0])


def test_out_of_a_custom_operator_is_written(pager):
    one, other = pair(pager, 40, 50)
    out = pager.zeros(40, 50)
    assert mine.into(other, out=out) is out
    out.evict()
    assert same(one + 1, out)


def test_what_an_operator_keeps_stays_pinned_and_is_reported(pager):
    _, other = pair(pager, 40, 50)
    with pytest.warns(RuntimeWarning, match="pagert_tests.keep.default kept a view"):
        mine.keep(other)
    kept.pop().fill_(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        secretly_double(other)
    other.evict()
    assert (plain(other).view(-1)[1:] == 10).all()


@pytest.mark.parametrize("name", ["enlarge", "transpose", "exchange"])
def test_another_shape_or_memory_of_an_operand_is_refused_by_name(pager, name):
    one, other = pair(pager, 40, 50)
    with pytest.raises(UnsupportedOperator, match=rf"pagert_tests\.{name}\.default.*give it a"):
        getattr(mine, name)(other)
    other.evict()
    assert same(one, other)


def test_operands_of_two_pagers_are_refused(make_pager):
    first, second = make_pager(), make_pager()
    with pytest.raises(ForeignTensor, match=r"pagert_tests\.add_to_first"):
        add_to_first(first.zeros(5), second.zeros(5))
