# SPDX-License-Identifier: Apache-2.0
"""An operation may end when a fence has passed: its operands are held until then, beyond the call."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import pagert
from pagert._core.operation import Operation
from pagert._core.pump import READ, UPDATE
from pagert.errors import OutOfFrames, PagertError, TransferTimeout
from pagert.tensor import PagedTensor

PAGE = 4096
FRAMES = 8


class Fence:
    """Passes when it is told to, or when it has been asked often enough."""

    def __init__(self, asked: int | None = None) -> None:
        self.done = False
        self.asked = asked

    def passed(self) -> bool:
        if self.asked is not None:
            self.asked -= 1
            self.done = self.done or self.asked < 0
        return self.done


@pytest.fixture
def pager():
    with pagert.Pager(
        device="cpu",
        device_bytes=FRAMES * PAGE,
        host_bytes=64 * PAGE,
        page_bytes=PAGE,
        warn_seconds=0.2,
        deadline_seconds=0.4,
    ) as pager:
        yield pager
        assert pager.pump.check() == 0


def tensor_of(pager, pages: int, value: float = 0.0) -> PagedTensor:
    return pager.tensor(torch.full((pages * PAGE // 4,), value))


def begin(tensor: PagedTensor, mode: int = UPDATE) -> tuple[Operation, torch.Tensor]:
    operation = Operation(PagedTensor, "test")
    operation.add(tensor, mode)
    operation.pin()
    return operation, operation.dense(tensor)


def test_operands_stay_held_until_the_fence_has_passed(pager) -> None:
    tensor = tensor_of(pager, 3)
    operation, dense = begin(tensor)
    fence = Fence()
    operation.end(fence)
    assert pager.stats().held_bytes == 3 * PAGE
    dense.fill_(7)  # the work goes on after the call
    fence.done = True
    tensor_of(pager, 1).sum()  # the next call finds that it has passed
    assert pager.stats().held_bytes == 0
    tensor.evict()
    assert tensor.eq(7).all()


def test_a_fence_that_has_passed_lets_go_at_once(pager) -> None:
    operation, _ = begin(tensor_of(pager, 2))
    operation.end(Fence(asked=0))
    assert pager.stats().held_bytes == 0


def test_who_needs_the_frames_waits_for_the_fence_and_is_not_refused(pager) -> None:
    first, second = tensor_of(pager, 5, 1.0), tensor_of(pager, 5, 2.0)
    operation, dense = begin(first)
    operation.end(Fence(asked=20))
    dense.add_(1)
    assert second.sum() == second.numel() * 2  # five pages beside five held ones of eight
    assert first.sum() == first.numel() * 2


def test_who_needs_the_frames_of_work_that_never_ends_is_told_at_the_deadline(pager) -> None:
    first, second = tensor_of(pager, 5), tensor_of(pager, 5)
    operation, _ = begin(first)
    fence = Fence()
    operation.end(fence)
    with pytest.raises(TransferTimeout, match="frames held"):
        second.sum()
    fence.done = True
    assert second.sum() == 0


def test_more_than_the_device_is_refused_at_once_whatever_ends(pager) -> None:
    operation, _ = begin(tensor_of(pager, 2))
    operation.end(fence := Fence())
    both = Operation(PagedTensor, "test")
    both.add(tensor_of(pager, 5), READ)
    both.add(tensor_of(pager, 5), READ)
    with pytest.raises(OutOfFrames, match="do not fit"):
        both.pin()
    fence.done = True


def test_an_operation_that_waits_for_its_fence_keeps_its_operands_alive(pager) -> None:
    tensor = tensor_of(pager, 2)
    operation, dense = begin(tensor)
    fence = Fence()
    operation.end(fence)
    known = weakref.ref(operation)
    del tensor, operation
    gc.collect()
    assert known() is not None
    assert pager.stats().held_bytes == 2 * PAGE
    dense.fill_(1)
    del dense
    fence.done = True
    tensor_of(pager, 1).sum()
    assert known() is None


def test_evict_and_flush_wait_for_the_fence(pager) -> None:
    tensor = tensor_of(pager, 2)
    operation, dense = begin(tensor)
    dense.fill_(3)
    operation.end(Fence(asked=5))
    tensor.evict()
    assert tensor.tier == "host"
    assert tensor.eq(3).all()


def test_close_waits_for_the_fence() -> None:
    pager = pagert.Pager(
        device="cpu", device_bytes=FRAMES * PAGE, host_bytes=64 * PAGE, page_bytes=PAGE
    )
    operation, _ = begin(tensor_of(pager, 2))
    fence = Fence(asked=5)
    operation.end(fence)
    pager.close()
    assert fence.done


def test_close_reports_work_that_never_ends_and_the_pager_works_on(pager) -> None:
    tensor = tensor_of(pager, 2, 4.0)
    operation, _ = begin(tensor, READ)
    fence = Fence()
    operation.end(fence)
    with pytest.raises(TransferTimeout):
        pager.close()
    assert tensor.eq(4).all()
    fence.done = True


def test_an_operation_that_is_dropped_without_its_end_lets_go(pager) -> None:
    operation, dense = begin(tensor_of(pager, 3))
    del operation, dense
    gc.collect()
    tensor_of(pager, 1).sum()
    assert pager.stats().held_bytes == 0


def test_close_refuses_while_a_call_is_under_way(pager) -> None:
    operation, _ = begin(tensor_of(pager, 1))
    with pytest.raises(PagertError, match="still holds"):
        pager.close()
    operation.end()


def test_another_thread_waits_for_the_fence_too(pager) -> None:
    first, second = tensor_of(pager, 6, 1.0), tensor_of(pager, 6, 2.0)
    operation, dense = begin(first)
    operation.end(Fence(asked=50))
    sums: list[float] = []
    thread = threading.Thread(target=lambda: sums.append(float(second.sum())))
    thread.start()
    dense.add_(1)
    thread.join()
    assert sums == [second.numel() * 2.0]
    assert first.eq(2).all()


def test_a_settling_thread_is_waited_for_where_a_tier_is_full(pager) -> None:
    """Who meets a full tier while another thread settles tries again after it."""
    inside, go_on = threading.Event(), threading.Event()

    class Work:
        waits = True

        def run(self) -> None:
            self.waits = False
            inside.set()
            go_on.wait()

    work = Work()
    pager.deferred[0] = work
    thread = threading.Thread(target=pager.settle)
    thread.start()
    inside.wait()
    threading.Timer(0.05, go_on.set).start()
    assert pager.settle(), "another thread has made room meanwhile"
    thread.join()
    assert not pager.settle()
