# SPDX-License-Identifier: Apache-2.0
"""Updates that wait: nothing is lost or kept by errors, Ctrl-C and threads, nor when their tensors go."""

from __future__ import annotations

import copy
import gc
import itertools
import signal
import threading
import time
import weakref

import pytest
import torch
from pagers import REAL
from stepping import Pair, adamw, open_pager, plain, same, waits

import pagert

pytestmark = pytest.mark.skipif(not REAL, reason="the fake runtime defers nothing")


@pytest.fixture
def pager():
    with open_pager() as pager:
        yield pager


# Lifetimes.


def reserved(pager) -> int:
    pager.tensor([1.0]).sum()
    return pager.stats().reserved_bytes


def test_dropped_training_with_waiting_updates_frees_its_regions(pager):
    gc.collect()
    gc.disable()  # nothing of it may be left to the garbage collector
    try:
        before = reserved(pager)
        pair = Pair(pager, adamw)
        pair.step()
        assert any(waits(parameter) for parameter in pair.paged)
        assert reserved(pager) > before
        updates = [weakref.ref(update) for update in pager.deferred.values()]
        # A stock optimizer and its hooks are cycles; what it holds is not.
        for optimizer in pair.optimizers:
            optimizer.state.clear()
            optimizer.param_groups.clear()
        del pair, optimizer
        assert all(update() is None for update in updates)
        assert len(pager.deferred) == 0
        assert reserved(pager) == before
    finally:
        gc.enable()


def test_gradients_are_freed_by_their_update(pair):
    pager = pair.pager
    with_gradients = reserved(pager)
    gradient_bytes = 0
    for parameter in pair.paged:
        size = parameter.numel() * parameter.itemsize
        gradient_bytes += -(-size // pager.page_bytes) * pager.page_bytes
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    assert reserved(pager) == with_gradients  # the updates have them
    for parameter in pair.paged:
        parameter.sum()
    assert reserved(pager) == with_gradients - gradient_bytes
    pair.check()


def test_state_is_right_without_its_parameter(pair):
    states = [list(optimizer.state.values()) for optimizer in pair.optimizers]
    for optimizer in pair.optimizers:
        optimizer.state.clear()
        optimizer.param_groups.clear()
    pair.plain.clear()
    pair.paged.clear()
    assert waits(states[1][0]["exp_avg"])
    for one, other in zip(*states, strict=True):
        for name, value in one.items():
            assert same(value, other[name])


def test_parameters_are_right_without_their_optimizer(pair):
    for optimizer in pair.optimizers:
        optimizer.state.clear()
    pair.optimizers.clear()
    for one, other in zip(pair.plain, pair.paged, strict=True):
        assert waits(other)
        one.grad = other.grad = None
        assert same(one, other)


def test_close_with_waiting_updates_ends_and_who_looks_is_told(pair):
    pager, parameter = pair.pager, pair.paged[0]
    pager.close()
    with pytest.raises(pagert.PagerClosed):
        parameter.sum()
    with pytest.raises(pagert.PagerClosed):
        parameter.sum()


def test_copy_of_an_optimizer_has_the_update(pair):
    copies = [copy.deepcopy(optimizer) for optimizer in pair.optimizers]
    for one, other in zip(*(list(c.state.values()) for c in copies), strict=True):
        for name, value in one.items():
            assert same(value, other[name])
    for one, other in zip(*(c.param_groups[0]["params"] for c in copies), strict=True):
        assert same(one, other)
    pair.check()


def test_graph_from_before_the_step_finds_what_it_finds_for_plain_parameters(pair):
    pair.check()
    losses = [parameters[0].square().sum() for parameters in (pair.plain, pair.paged)]
    pair.step()
    assert waits(pair.paged[0])
    for (
        loss
    ) in losses:  # PyTorch does not count a fused step as a change: what was saved has changed
        loss.backward()
    pair.check()


def test_trace_of_updates_that_wait_can_be_replayed(pager):
    pair = Pair(pager, adamw)
    pair.step()
    with pager.trace() as trace:
        pair.step()
        assert waits(pair.paged[0])
        for parameter in pair.paged:
            parameter.sum()
        pair.step()
    assert pagert.simulate(trace, capacity_pages=128).faults > 0
    pair.check()


def test_flush_runs_what_waits(pair):
    pair.pager.flush()
    assert not any(waits(parameter) for parameter in pair.paged)
    pair.check()


# Errors.


def test_windows_that_leave_no_room_are_said_and_nothing_is_lost():
    with open_pager(device_bytes=64 * 4096) as pager:
        pair = Pair(pager, adamw)
        pair.step()
        window = pager.tensor(torch.ones(63 * 1024))
        with window.resident():
            for _ in range(2):
                with pytest.raises(pagert.OutOfFrames):
                    pair.paged[0][:1].sum()
            assert waits(pair.paged[0])
        pair.check()


def test_room_for_ranges_is_enough_to_look_at_a_part():
    with open_pager(device_bytes=64 * 4096) as pager:
        pair = Pair(pager, adamw, [(30 * 1024,), (30 * 1024,)])
        pair.step()
        window = pager.tensor(torch.ones(50 * 1024))
        with window.resident():  # 14 frames are left, and the parameter takes 30
            assert same(pair.plain[0][:5], pair.paged[0][:5])
        pair.check()


def test_interrupted_updates_go_on_where_they_were():
    """Ctrl-C again and again, most of all within kernels: no element is updated twice."""

    def interrupt(*_):
        raise KeyboardInterrupt

    interrupts = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with open_pager(device_bytes=64 * 4096, defer_updates=True) as pager:
            pair = Pair(pager, adamw, [(400_000,), (300_001,)])
            for _ in range(3):
                pair.step()
                for parameter in pair.paged:
                    while waits(parameter):
                        try:
                            signal.setitimer(signal.ITIMER_REAL, 0.002)
                            parameter._region.settle()
                            signal.setitimer(signal.ITIMER_REAL, 0)
                        except KeyboardInterrupt:
                            interrupts += 1
            pair.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 0


# Threads.


def test_threads_that_look_at_one_update_run_it_once(pager):
    pair = Pair(pager, adamw, [(120_000,), (60_000,)])
    for _ in range(8):
        pair.step()
        looked_at = list(itertools.chain(*(pair.tensors(index).values() for index in (0, 1))))
        paged = [other for _, other in looked_at if hasattr(other, "_region")]
        barrier = threading.Barrier(len(paged))
        found = {}

        def look(tensor, barrier=barrier, found=found):
            barrier.wait()
            found[id(tensor)] = plain(tensor)

        threads = [threading.Thread(target=look, args=(tensor,)) for tensor in paged]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one, other in looked_at:
            assert same(one, found.get(id(other), other))
    pair.check()


def test_thread_that_holds_frames_and_looks_does_not_hang_with_one_that_updates():
    with open_pager(device_bytes=64 * 4096, deadline_seconds=20.0) as pager:
        pair = Pair(pager, adamw)
        pair.step()
        window = pager.tensor(torch.ones(63 * 1024))
        parameter = pair.paged[0]
        update = parameter._region.deferred
        found = []

        def look():
            try:
                found.append(plain(parameter))
            except pagert.OutOfFrames as error:
                found.append(error)

        thread = threading.Thread(target=look)
        with window.resident():
            thread.start()
            while update.waits:  # until it runs there, and finds no frames
                time.sleep(0.001)
            with pytest.raises(pagert.OutOfFrames):
                parameter.sum()
        thread.join()
        assert isinstance(found[0], (torch.Tensor, pagert.OutOfFrames))
        pair.check()


def test_flush_waits_for_updates_that_another_thread_runs(pager):
    pair = Pair(pager, adamw, [(200_000,), (100_000,)])
    for _ in range(5):
        pair.step()
        threads = [threading.Thread(target=parameter.sum) for parameter in pair.paged]
        for thread in threads:
            thread.start()
        pager.flush()
        assert not any(update._arguments for update in list(pager.deferred.values()))
        for thread in threads:
            thread.join()
    pair.check()
