# SPDX-License-Identifier: Apache-2.0
"""Flash that fails, lies or hangs while a pager runs: a named error, nothing lost, and work goes on.

Each scenario runs in a process of its own, under a library that meddles with the engine's I/O.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import pagert
from pagert._core.pump import READ

HERE = pathlib.Path(__file__)
PASS, WRITE_FAILS, READ_FAILS, READ_LIES, HANG = range(5)
SETUPS = {"device+flash": {}, "device+host+flash": {"host_bytes": "64KiB"}}
NUMBERS = 1 << 16  # 256 KiB of float32, four tensors of which fill the device tier


class Shim:
    """The switches of the preloaded library."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.mode, self.errno, self.calls = (
            ctypes.c_int.in_dll(library, name)
            for name in ("flash_shim", "flash_shim_errno", "flash_shim_calls")
        )

    @contextlib.contextmanager
    def set(self, mode: int, number: int = 0):
        self.calls.value = 0
        self.errno.value = number
        self.mode.value = mode
        try:
            yield
        finally:
            self.mode.value = PASS
        assert self.calls.value > 0, "nothing was meddled with"


def open_pager(setup: str, folder: str, **settings) -> pagert.Pager:
    """Open a pager of which it is known where pages lie: no prediction brings them before they are asked for.

    Failures under lookahead are what tests/c/core_stress.c is for.
    """
    settings = {"deadline_seconds": 60, "policy": "lru", **settings}
    return pagert.Pager(
        device_bytes="1MiB", flash_path=folder, flash_bytes="16MiB", page_bytes=4096,
        io_backend="threads", **SETUPS[setup], **settings,
    )  # fmt: skip


def numbers(seed: int) -> torch.Tensor:
    return torch.arange(NUMBERS, dtype=torch.float32) * 3 + seed


def check(pager: pagert.Pager, tensors: list, expected: list) -> None:
    """Every byte is there, and the core's state is whole."""
    for tensor, plain in zip(tensors, expected):
        with tensor.resident("read") as dense:
            assert torch.equal(dense, plain)
    assert pager.pump.check() == 0
    assert pager.stats().held_bytes == 0


def writes_fail(shim: Shim, setup: str, folder: str, number: int = errno.EIO) -> None:
    with open_pager(setup, folder) as pager:
        expected = [numbers(seed) for seed in range(3)]
        tensors = [pager.tensor(plain) for plain in expected]
        with shim.set(WRITE_FAILS, number):
            for call in (
                pager.flush if setup == "device+flash" else tensors[0].evict,
                lambda: [pager.tensor(numbers(seed)) for seed in range(9)],
            ):
                with pytest.raises(pagert.TransferError, match=os.strerror(number)) as caught:
                    call()
                assert caught.value.errno == number
                assert caught.value.filename == folder
                assert isinstance(caught.value, OSError)
                assert "write from" in str(caught.value) and "byte" in str(caught.value)
            for tensor, plain in zip(tensors, expected):  # still there, still usable
                if tensor.tier == "device":
                    assert torch.equal(tensor.to("cpu"), plain)
        gc.collect()
        tensors += [pager.tensor(numbers(seed)) for seed in range(3, 9)]
        expected += [numbers(seed) for seed in range(3, 9)]
        check(pager, tensors, expected)
        tensors[0].add_(1)
        expected[0].add_(1)
        pager.flush()
        check(pager, tensors, expected)
        assert pager.stats().failed_transfers > 0


def disk_is_full(shim: Shim, setup: str, folder: str) -> None:
    writes_fail(shim, setup, folder, errno.ENOSPC)


def reads_fail(shim: Shim, setup: str, folder: str) -> None:
    with open_pager(setup, folder) as pager:
        expected = [numbers(seed) for seed in range(9)]
        tensors = [pager.tensor(plain) for plain in expected]
        assert tensors[0].tier == "flash"
        with shim.set(READ_FAILS, errno.EIO):
            for _ in range(2):
                with pytest.raises(pagert.TransferError, match="read from flash") as caught:
                    tensors[0].add_(1)
                assert caught.value.errno == errno.EIO
            while pager.stats().in_flight_transfers:  # who asks now would share a read that fails
                time.sleep(0.001)
        assert pager.stats().held_bytes == 0
        check(pager, tensors, expected)


def reads_lie(shim: Shim, setup: str, folder: str) -> None:
    with open_pager(setup, folder) as pager:
        expected = [numbers(seed) for seed in range(9)]
        tensors = [pager.tensor(plain) for plain in expected]
        with shim.set(READ_LIES):
            with pytest.raises(pagert.TransferError, match="checksum mismatch") as caught:
                tensors[0].sum()
            assert caught.value.errno == errno.EBADMSG
            # Who asks for a page while its read is in flight shares that read, and this one lies.
            while pager.stats().in_flight_transfers:
                time.sleep(0.001)
        check(pager, tensors, expected)


def never_completes(shim: Shim, setup: str, folder: str) -> None:
    """Warned of, then raised; what was waited for, how long, and where is in both messages."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("pagert").addHandler(handler)
    with open_pager(setup, folder, warn_seconds=0.1, deadline_seconds=0.3) as pager:
        expected = [numbers(seed) for seed in range(9)]
        tensors = [pager.tensor(plain) for plain in expected]
        calls = [tensors[0].sum, pager.flush if setup == "device+flash" else tensors[8].evict]
        with shim.set(HANG):
            for call in [*calls, pager.close]:
                records.clear()
                with pytest.raises(pagert.TransferTimeout) as caught:
                    call()
                for text in (str(caught.value), records[0].getMessage()):
                    assert "has waited" in text and " s old" in text and folder in text, text
                    assert "deadline_seconds=0.3" in text and "flash of " in text, text
                assert not pager.closed
                with pytest.raises(pagert.PagertError):  # no other call hangs either
                    pager.tensor(numbers(0)).add_(tensors[1])
        assert pager.stats().held_bytes == 0
        check(pager, tensors, expected)
    assert pager.closed


def is_dropped_while_it_hangs(shim: Shim, setup: str, folder: str) -> None:
    """Neither freed under the engine nor waited for for ever."""
    pager = open_pager(setup, folder, warn_seconds=0.1, deadline_seconds=0.2)
    tensors = [pager.tensor(numbers(seed)) for seed in range(9)]
    with shim.set(HANG):
        with pytest.raises(pagert.TransferTimeout):
            tensors[0].sum()
        cycle: list = [pager, *tensors]
        cycle.append(cycle)
        del pager, tensors, cycle
        gc.collect()
    time.sleep(0.1)  # what hung goes on now, into memory that is still there


def is_interrupted(shim: Shim, setup: str, folder: str) -> None:
    def interrupt(*_: object) -> None:
        if shim.calls.value > 0:  # it hangs
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    with open_pager(setup, folder) as pager:
        expected = [numbers(seed) for seed in range(9)]
        tensors = [pager.tensor(plain) for plain in expected]
        writes = pager.flush if setup == "device+flash" else tensors[8].evict
        for call in (tensors[0].sum, lambda: tensors[1].add_(1), writes, pager.close):
            if call == writes:  # something to write
                expected[8].add_(1)
                tensors[8].add_(1)
            with shim.set(HANG):
                if call == pager.close:  # something to wait for
                    tensors[3].prefetch()
                    while shim.calls.value == 0:
                        time.sleep(0.001)
                signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
                with pytest.raises(KeyboardInterrupt):
                    call()
            assert pager.stats().held_bytes == 0
            check(pager, tensors, expected)


def close_ends_waits(shim: Shim, setup: str, folder: str) -> None:
    """Threads that wait inside of calls get PagerClosed, and close() waits for the engine alone."""
    pager = open_pager(setup, folder)
    tensors = [pager.tensor(numbers(seed)) for seed in range(9)]
    found: list[BaseException] = []

    def read(tensor) -> None:
        try:
            tensor.sum()
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=read, args=(tensor,)) for tensor in tensors[:3]]
    closer = threading.Thread(target=pager.close)
    with shim.set(HANG):
        for thread in threads:
            thread.start()
        while shim.calls.value == 0:
            time.sleep(0.001)
        closer.start()
        for thread in threads:
            thread.join()
        assert not pager.pump.closed or closer.is_alive()
    closer.join()
    assert pager.closed
    assert [type(error) for error in found] == [pagert.PagerClosed] * 3


def waiting_updates(pager: pagert.Pager) -> tuple[list, list]:
    """Parameters, gradients and state whose updates wait, with no page on the device; and what they shall be."""
    torch.manual_seed(0)
    values = [torch.randn(NUMBERS) for _ in range(4)]
    gradients = [torch.randn(NUMBERS) for _ in range(4)]
    both: list[list] = []
    for page in (torch.clone, pager.tensor):
        parameters = [page(value).requires_grad_() for value in values]
        optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True)
        for _ in range(2):
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = page(gradient)
            optimizer.step()
        both.append([])
        for parameter in parameters:
            state = optimizer.state[parameter]
            both[-1] += [parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
    expected, tensors = both
    for tensor in reversed(tensors):
        tensor.evict()
    assert all(tensor._region.deferred.waits for tensor in tensors)
    return tensors, expected


def check_updated(pager: pagert.Pager, tensors: list, expected: list) -> None:
    for tensor, plain in zip(tensors, expected):
        assert torch.equal(torch.empty(NUMBERS).copy_(tensor), plain)
    check(pager, tensors, expected)


def reads_fail_within_an_update(shim: Shim, setup: str, folder: str) -> None:
    """Whoever looks is told; then it goes on with the range that failed. No element is updated twice."""
    for mode, looked_at in ((READ_FAILS, 0), (READ_LIES, 1), (READ_FAILS, 2), (READ_LIES, 3)):
        with open_pager(setup, folder) as pager:
            tensors, expected = waiting_updates(pager)
            update = tensors[0]._region.deferred
            for tensor in tensors[4:]:  # what is in the host tier now is none of these
                tensor.evict()
            # The first half of what it reads is there, and all of the parameter, which it holds from the start.
            for tensor, size_bytes in zip(tensors, [4 * NUMBERS] + [2 * NUMBERS] * 3):
                pager.pump.pin([(tensor._region, 0, size_bytes, READ)]).release()
            with shim.set(mode, errno.EIO):
                for _ in range(2):
                    with pytest.raises(pagert.TransferError):
                        tensors[looked_at].sum()
                    assert update.waits and len(update._ran) > 0
                # Who asks now would share a read that fails.
                while pager.stats().in_flight_transfers:
                    time.sleep(0.001)
            assert pager.stats().held_bytes == 0
            check_updated(pager, tensors, expected)


def updates_meet_a_full_disk(shim: Shim, setup: str, folder: str) -> None:
    with open_pager(setup, folder) as pager:
        tensors, expected = waiting_updates(pager)
        failures = 0
        with shim.set(WRITE_FAILS, errno.ENOSPC):
            for tensor in tensors:  # together they change more than the device holds
                try:
                    tensor.sum()
                except pagert.TransferError as error:
                    assert error.errno == errno.ENOSPC
                    failures += 1
            while pager.stats().in_flight_transfers:  # or a later pin hears of their failure
                time.sleep(0.001)
        assert failures > 0
        check_updated(pager, tensors, expected)


SCENARIOS = [writes_fail, disk_is_full, reads_fail, reads_lie, never_completes,
             is_dropped_while_it_hangs, is_interrupted, close_ends_waits,
             reads_fail_within_an_update, updates_meet_a_full_disk]  # fmt: skip


@pytest.fixture(scope="module")
def shim_library(tmp_path_factory):
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler: {compiler[0]}")
    library = tmp_path_factory.mktemp("shim") / "flash_shim.so"
    source = HERE.with_name("flash_shim.c")
    subprocess.run(
        [*compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library)], check=True
    )
    return library


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_flash_that(shim_library, tmp_path, scenario):
    done = subprocess.run(
        [sys.executable, str(HERE), scenario, str(tmp_path)],
        env={**os.environ, "LD_PRELOAD": str(shim_library)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(tmp_path) == []


if __name__ == "__main__":
    name, flash_folder = sys.argv[1:]
    for setup_name in SETUPS:
        print(setup_name, flush=True)
        {each.__name__: each for each in SCENARIOS}[name](Shim(), setup_name, flash_folder)
