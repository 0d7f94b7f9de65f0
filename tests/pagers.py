# SPDX-License-Identifier: Apache-2.0
"""Pagers for the tests of the tensor layer:

over the fake runtime, and over the real one in each set-up.
"""

from __future__ import annotations

import sys
import types

import fake_runtime
import pytest
import torch

try:
    import pagert._core.pump
    import pagert.runtime  # noqa: F401  is it there?

    REAL = True
except ImportError:  # the extension modules are not built: the fake stands in for them
    stub = types.ModuleType("pagert._core.pump")
    stub.READ, stub.UPDATE, stub.OVERWRITE = range(3)
    sys.modules["pagert._core.pump"] = stub
    stub = types.ModuleType("pagert.runtime")
    stub.Runtime = fake_runtime.FakeRuntime
    sys.modules["pagert.runtime"] = stub
    REAL = False

from pagert.pager import Pager

MIB = 1 << 20

# Tiers below the device; "fake" is the runtime that evicts at every unpin.
SETUPS = {
    "fake": None,
    "host": {"host_bytes": 64 * MIB},
    "flash": {"flash_bytes": 64 * MIB},
    "host-flash": {"host_bytes": MIB // 2, "flash_bytes": 64 * MIB},
}
if not REAL:
    SETUPS = {"fake": None}


class FakePager(Pager):
    """The pager of the users over the fake runtime."""

    __init__ = fake_runtime.FakeRuntime.__init__
    closed = fake_runtime.FakeRuntime.closed
    defer_updates = fake_runtime.FakeRuntime.defer_updates
    flush = fake_runtime.FakeRuntime.flush
    settle = fake_runtime.FakeRuntime.settle
    close = fake_runtime.FakeRuntime.close
    stats = fake_runtime.FakeRuntime.stats
    reset_stats = fake_runtime.FakeRuntime.reset_stats
    _check_open = fake_runtime.FakeRuntime._check_open
    __enter__ = fake_runtime.FakeRuntime.__enter__
    __exit__ = fake_runtime.FakeRuntime.__exit__


def open_pager(setup, device_bytes, page_bytes, flash_path=None, seed=0):
    """Make a pager of one set-up."""
    settings = SETUPS[setup]
    if settings is None:
        return FakePager(device_bytes=device_bytes, page_bytes=page_bytes, seed=seed)
    if "flash_bytes" in settings:
        settings = {**settings, "flash_path": flash_path}
    return Pager(device="cpu", device_bytes=device_bytes, page_bytes=page_bytes, **settings)


def check_idle(pager):
    """Assert that no pin is left, and for the fake that no byte was written outside of a window."""
    if isinstance(pager, FakePager):
        pager.pump.check_idle()
    elif not pager.closed:
        assert pager.pump.check() == 0
        assert pager.stats().held_bytes == 0, "a pin was left"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute on one thread: the tensors are small, more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=SETUPS)
def make_pager(request, tmp_path):
    """Make pagers of one set-up, which are idle in the end."""
    pagers = []

    def make(device_bytes: int = 1 << 20, page_bytes: int = 4096, seed: int = 0):
        pager = open_pager(request.param, device_bytes, page_bytes, tmp_path, seed)
        pagers.append(pager)
        return pager

    yield make
    for pager in pagers:
        check_idle(pager)
        pager.close()


@pytest.fixture
def pager(make_pager):
    """A pager of one mebibyte in pages of 4 KiB."""
    return make_pager()
