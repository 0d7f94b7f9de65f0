# SPDX-License-Identifier: Apache-2.0
"""The life of a pump: closing, collection, forks, several at once, threads that wait for each other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import threading

import numpy
import pytest
import torch

import pagert
from pagert._core.device import CpuDevice
from pagert._core.pump import READ, UPDATE, Pump
from pagert.engines.flash import open_flash
from pagert.errors import (
    ConfigurationError,
    ForeignTensor,
    OutOfFrames,
    PagerClosed,
    PagertError,
    TransferTimeout,
)

PAGE_BYTES = 4096


def open_pump(folder=None, device_frames=8, **settings) -> Pump:
    flash = None
    if folder is not None:
        flash = open_flash(folder, capacity_bytes=400 * PAGE_BYTES, block_bytes=PAGE_BYTES)
    device = CpuDevice(
        device_bytes=device_frames * PAGE_BYTES, host_bytes=0 if folder else 400 * PAGE_BYTES
    )
    settings = {"deadline_seconds": 60.0, **settings}
    return Pump(device, page_bytes=PAGE_BYTES, page_count=4096, flash=flash, **settings)


@pytest.fixture(params=["flash", "host"])
def pump(request, tmp_path):
    opened = open_pump(tmp_path if request.param == "flash" else None)
    yield opened
    opened.close()


def use(pump: Pump, region, mode=UPDATE):
    return pump.pin([(region, 0, region.size_bytes, mode)])


def numbers(pump: Pump, pin, size_bytes: int) -> numpy.ndarray:
    at = pin.device_bytes[0]
    return numpy.frombuffer(pump.arena, dtype=numpy.uint8)[at : at + size_bytes]


# Closing


def test_close_refuses_while_a_pin_is_held_and_the_pump_stays_usable(pump):
    region = pump.reserve(3 * PAGE_BYTES)
    with use(pump, region) as pin:
        numbers(pump, pin, region.size_bytes)[:] = 7
        with pytest.raises(PagertError, match=r"still holds tensors of this pager; leave it"):
            pump.close()
        assert not pump.closed
    pump.evict(region, 0, region.size_bytes)
    with use(pump, region, READ) as pin:
        assert (numbers(pump, pin, region.size_bytes) == 7).all()


def test_every_call_after_close_says_so(pump):
    region = pump.reserve(PAGE_BYTES)
    pump.close()
    pump.close()
    assert pump.closed
    calls = [
        lambda: pump.reserve(1), lambda: use(pump, region), lambda: pump.prefetch(region, 0, 1),
        lambda: pump.evict(region, 0, 1), pump.flush, lambda: pump.locate(region, 0, 1), pump.state,
        pump.reset_counters, pump.check,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(PagerClosed, match="the pager is closed"):
            call()


def test_a_pump_that_another_thread_uses_closes_and_its_calls_end_by_name(tmp_path):
    for seed in range(20):
        chance = random.Random(seed)
        pump = open_pump(tmp_path if seed % 2 else None)
        regions = [pump.reserve(5 * PAGE_BYTES) for _ in range(6)]
        failures, started = [], threading.Barrier(4)

        def work(pump=pump, regions=regions, failures=failures, started=started, seed=seed):
            chance = random.Random(seed)
            started.wait()
            try:
                while True:
                    with use(pump, chance.choice(regions)):
                        pass
                    pump.evict(regions[0], 0, PAGE_BYTES)
            except PagerClosed:
                pass
            except PagertError as error:
                if "an operator holds these pages" not in str(error):
                    failures.append(error)
                else:
                    work()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        for _ in range(chance.randint(0, 30)):
            pump.locate(regions[0], 0, 1)
        while not pump.closed:
            try:
                pump.close()
            except PagertError as error:
                assert "still holds" in str(error), seed
        for thread in threads:
            thread.join()
        assert not failures, (seed, failures)


# Collection


def test_a_region_in_a_cycle_is_released_when_the_cycle_is_collected(pump):
    cycle = [pump.reserve(3 * PAGE_BYTES)]
    cycle.append(cycle)
    with use(pump, cycle[0]):
        pass
    pin_cycle = [use(pump, pump.reserve(2 * PAGE_BYTES))]
    pin_cycle.append(pin_cycle)
    assert pump.state()["reserved_pages"] == 5
    del cycle, pin_cycle
    gc.collect()
    assert pump.state()["reserved_pages"] == 0
    assert pump.state()["held_frames"] == 0


def test_a_pump_in_a_cycle_stops_with_requests_in_flight(tmp_path):
    for seed in range(30):
        pump = open_pump(tmp_path if seed % 2 else None)
        regions = [pump.reserve(5 * PAGE_BYTES) for _ in range(6)]
        for region in regions:
            with use(pump, region):
                pass
        for region in regions[:2]:
            pump.prefetch(region, 0, region.size_bytes)
        held = use(pump, regions[-1]) if seed % 3 == 0 else None
        cycle = [pump, regions, held]
        cycle.append(cycle)
        del pump, regions, region, cycle, held
        gc.collect()
    assert os.listdir(tmp_path) == []


EXIT = """
import gc, os, sys, threading, torch, pagert
folder, way, setup = sys.argv[1:]
host = "64KiB" if setup == "three" else None
pager = pagert.Pager(device_bytes="1MiB", host_bytes=host, flash_path=folder, flash_bytes="16MiB", page_bytes=4096)
tensors = [pager.tensor(torch.arange(65536.) + k) for k in range(9)]
model = pager.page_(torch.nn.Linear(300, 300))
model(torch.ones(2, 300)).sum().backward()
tensors[0].prefetch()
for tensor in tensors:
    tensor.cycle = tensor
if way == "thread":
    # Not an operator: Python ends a thread that asks for the GIL now, which PyTorch's C++ does not survive.
    regions = [tensor._region for tensor in tensors]
    def work():
        while True:
            for region in regions:
                pager.pump.pin([(region, 0, region.size_bytes, 1)]).release()
    threading.Thread(target=work, daemon=True).start()
if way == "resident":
    held = tensors[3].resident()
    held.__enter__()
if way == "exception":
    raise ValueError("on purpose")
if way in ("term", "kill"):
    print("ready", flush=True)
    while True:
        for tensor in tensors:
            tensor.add_(1)
if way == "close":
    pager.close()
if way == "quick":
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("way", "setup"),
    [
        ("end", "two"),
        ("end", "three"),
        ("close", "three"),
        ("thread", "two"),
        ("thread", "three"),
        ("resident", "two"),
        ("exception", "three"),
        ("quick", "two"),
    ],
)
def test_the_process_ends_and_leaves_nothing(tmp_path, way, setup):
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path), way, setup],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == (1 if way == "exception" else 0), done.stderr
    assert ("on purpose" in done.stderr) == (way == "exception"), done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("way", ["term", "kill"])
def test_a_process_that_is_killed_leaves_nothing(tmp_path, way):
    command = [sys.executable, "-c", EXIT, str(tmp_path), way, "two"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate() if way == "term" else process.kill()
        assert process.wait() < 0
    assert os.listdir(tmp_path) == []


# Forks


def in_child(call) -> int:
    """Run in a forked child; its exit status, 0 where the call returned true."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if call() else 1)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(params=["flash", "host"])
def pager(request, tmp_path):
    below = (
        {"flash_path": tmp_path, "flash_bytes": "16MiB"}
        if request.param == "flash"
        else {"host_bytes": "16MiB"}
    )
    with pagert.Pager(device_bytes="1MiB", page_bytes=4096, **below) as opened:
        yield opened
        assert opened.pump.check() == 0


def test_a_forked_child_is_refused_by_name_and_the_parent_goes_on(pager):
    tensors = [pager.tensor(torch.arange(65536.0) + k) for k in range(9)]
    for tensor in tensors:
        tensor.prefetch()

    def child() -> bool:
        for call in (tensors[0].sum, lambda: tensors[8].add_(1), pager.flush, pager.stats,
                     lambda: pager.tensor([1.0])):  # fmt: skip
            with pytest.raises(PagerClosed, match="parent process"):
                call()
        tensors.clear()
        gc.collect()
        pager.close()  # not the parent's
        other = pagert.Pager(device_bytes="1MiB", host_bytes="1MiB")
        return bool(other.tensor([2.0]).sum() == 2)

    for _ in range(5):
        assert in_child(child) == 0
    for k, tensor in enumerate(tensors):
        assert torch.equal(tensor.to("cpu"), torch.arange(65536.0) + k)


def test_what_is_held_stays_readable_in_a_forked_child(pager):
    tensor = pager.tensor(torch.arange(1000.0))
    other = [pager.tensor(torch.ones(65536)) for _ in range(9)]
    with tensor.resident() as dense:
        other[0].prefetch()

        def child() -> bool:
            return bool(torch.equal(dense, torch.arange(1000.0)))

        assert in_child(child) == 0
        dense += 1
    assert torch.equal(tensor.to("cpu"), torch.arange(1000.0) + 1)
    assert all(bool((each == 1).all()) for each in other)


def test_a_child_of_a_fork_in_a_resident_block_leaves_it_without_the_parents_lock(pager):
    tensor = pager.tensor(torch.arange(1000.0))
    stop = threading.Event()

    def work() -> None:
        other = [pager.tensor(torch.ones(65536)) for _ in range(6)]
        while not stop.is_set():
            for each in other:
                each.add_(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            held = tensor.resident()
            held.__enter__()
            assert in_child(lambda held=held: held.__exit__(None, None, None) is None) == 0
            held.__exit__(None, None, None)
    finally:
        stop.set()
        thread.join()


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), float(index))


def test_worker_processes_of_a_data_loader_come_and_go(pager):
    weight = pager.tensor(torch.ones(100, 1000))
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        sums = [float((batch @ weight).sum()) for batch in loader]
        assert sum(sums) == sum(range(40)) * 100 * 1000


def test_the_arena_does_not_double_while_a_forked_child_lives(pager):
    """What the parent writes while a child lives is not a copy on write."""
    tensor = pager.tensor(torch.ones(200_000))
    tensor.evict()
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()

    def child() -> None:
        ready.set()
        leave.wait(60)

    process = context.Process(target=child)
    process.start()
    ready.wait(60)
    try:
        address = pager.pump.arena.address
        with open(f"/proc/{process.pid}/maps") as maps:
            for line in maps:
                start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
                assert not start <= address < end, "the child has the arena"
    finally:
        leave.set()
        process.join()


# Several


def test_two_pagers_in_one_folder_keep_their_bytes_apart(tmp_path):
    settings = {
        "device_bytes": "1MiB",
        "flash_path": tmp_path,
        "flash_bytes": "16MiB",
        "page_bytes": 4096,
    }
    with pagert.Pager(**settings) as first, pagert.Pager(**settings) as second:
        ones = [first.tensor(torch.full((65536,), float(k))) for k in range(9)]
        twos = [second.tensor(torch.full((65536,), -float(k))) for k in range(9)]
        with pytest.raises(ForeignTensor):
            ones[0] + twos[0]
        first.flush()
        for k in range(9):
            assert bool((ones[k] == k).all()) and bool((twos[k] == -k).all())
        second.close()
        assert bool((ones[3] == 3).all())
    assert os.listdir(tmp_path) == []


def test_a_region_of_another_pump_is_refused_everywhere(pump):
    with_other = open_pump()
    region = with_other.reserve(PAGE_BYTES)
    for call in (lambda: use(pump, region), lambda: pump.prefetch(region, 0, 1),
                 lambda: pump.evict(region, 0, 1), lambda: pump.locate(region, 0, 1),
                 lambda: pump.locate(None, 0, 1), lambda: pump.pin([(None, 0, 1, READ)])):  # fmt: skip
        with pytest.raises(ForeignTensor, match="two pagers"):
            call()
    with_other.close()


# Threads that wait for each other


def test_threads_that_wait_for_each_others_frames_are_told_at_once():
    pump = open_pump(deadline_seconds=3600)
    regions = [pump.reserve(4 * PAGE_BYTES) for _ in range(4)]
    both_hold = threading.Barrier(2)
    outcomes = []

    def work(mine, wanted) -> None:
        with use(pump, mine):
            both_hold.wait()
            try:
                with use(pump, wanted):
                    outcomes.append("got it")
            except OutOfFrames as error:
                outcomes.append("told")
                assert "0 of 8 are unpinned" in str(error)

    threads = [threading.Thread(target=work, args=(regions[k], regions[2 + k])) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["got it", "told"]
    pump.close()


def test_a_pin_that_waits_for_a_thread_that_never_lets_go_ends_by_the_deadline(caplog):
    pump = open_pump(warn_seconds=0.05, deadline_seconds=0.2)
    first, second = pump.reserve(6 * PAGE_BYTES), pump.reserve(6 * PAGE_BYTES)
    held = []
    thread = threading.Thread(target=lambda: held.append(use(pump, first)))
    thread.start()
    thread.join()
    with pytest.raises(TransferTimeout, match=r"needs frames held by other threads has waited"):
        use(pump, second)
    assert any("it fails after deadline_seconds" in record.message for record in caplog.records)
    held.pop().release()
    use(pump, second).release()
    pump.close()


def test_a_pin_larger_than_the_device_does_not_wait_for_other_threads():
    pump = open_pump(deadline_seconds=3600)
    small, large = pump.reserve(PAGE_BYTES), pump.reserve(9 * PAGE_BYTES)
    held = []
    thread = threading.Thread(target=lambda: held.append(use(pump, small)))
    thread.start()
    thread.join()
    with pytest.raises(OutOfFrames, match="needs 9 frames"):
        use(pump, large)
    held.pop().release()
    pump.close()


def test_threads_that_contend_for_frames_all_get_their_turn(pump):
    """Each pin fits alone but not beside another: nobody is refused."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    failures = []

    def work(number: int) -> None:
        chance = random.Random(seed + number)
        regions = [pump.reserve(chance.randint(3, 8) * PAGE_BYTES) for _ in range(4)]
        expected = [0] * 4
        try:
            for step in range(100):
                k = chance.randrange(4)
                with use(pump, regions[k]) as pin:
                    seen = numbers(pump, pin, regions[k].size_bytes)
                    assert (seen == expected[k]).all(), (seed, number, step)
                    seen[:] = expected[k] = (number * 50 + step) % 256
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# Opening


def test_what_the_core_refuses_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="page_bytes=5000"):
        Pump(CpuDevice(device_bytes=20000, host_bytes=20000), page_bytes=5000, page_count=10)
    with pytest.raises(ConfigurationError, match=r"frames=\[4, 0, 0\]"):
        Pump(CpuDevice(device_bytes=4 * 4096), page_bytes=4096, page_count=10)
