# SPDX-License-Identifier: Apache-2.0
"""Pagers for the tests of the tensor layer: over the fake runtime, and over the real one in each set-up."""

from __future__ import annotations

import sys
import types

import fake_runtime
import pytest

try:
    import pagert._core.pump
    import pagert.runtime

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

SETUPS = ["fake"]


class FakePager(Pager):
    """The pager of the users over the fake runtime."""

    __init__ = fake_runtime.FakeRuntime.__init__
    closed = fake_runtime.FakeRuntime.closed
    flush = fake_runtime.FakeRuntime.flush
    close = fake_runtime.FakeRuntime.close
    stats = fake_runtime.FakeRuntime.stats
    reset_stats = fake_runtime.FakeRuntime.reset_stats
    _check_open = fake_runtime.FakeRuntime._check_open
    __enter__ = fake_runtime.FakeRuntime.__enter__
    __exit__ = fake_runtime.FakeRuntime.__exit__


@pytest.fixture(params=SETUPS)
def make_pager(request):
    """Make pagers of one set-up; afterwards no pin may be left and no byte written outside of a window."""
    pagers = []

    def make(device_bytes: int = 1 << 20, page_bytes: int = 4096, seed: int = 0):
        pager = FakePager(device_bytes=device_bytes, page_bytes=page_bytes, seed=seed)
        pagers.append(pager)
        return pager

    yield make
    for pager in pagers:
        if isinstance(pager, FakePager):
            pager.pump.check_idle()
        pager.close()


@pytest.fixture
def pager(make_pager):
    """A pager of one mebibyte in pages of 4 KiB."""
    return make_pager()
