# SPDX-License-Identifier: Apache-2.0
"""Bad input, end to end: a named exception with the value, the limit and the remedy; nothing lost."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pathlib
import resource
import shutil
import subprocess

import pytest
import torch

import pagert

KIB, MIB = 1 << 10, 1 << 20
SETUPS = {
    "device+host": {"host_bytes": "16MiB"},
    "device+flash": {"flash_bytes": "16MiB"},
    "device+host+flash": {"host_bytes": "64KiB", "flash_bytes": "16MiB"},
}


def open_pager(setup: str, folder: pathlib.Path, **settings) -> pagert.Pager:
    below = dict(SETUPS[setup])
    if "flash_bytes" in below:
        below["flash_path"] = folder
    return pagert.Pager(**{"device_bytes": "1MiB", "page_bytes": 4096, **below, **settings})


class Held:
    """A pager with more tensors than its device tier holds, and what they must hold."""

    def __init__(self, pager: pagert.Pager, count: int = 6) -> None:
        self.pager = pager
        self.expected = [torch.arange(65536.0) * 3 + k for k in range(count)]
        self.tensors = [pager.tensor(plain) for plain in self.expected]

    def check(self) -> None:
        """Every byte is there, no pin is left, and the pager still works."""
        assert self.pager.stats().held_bytes == 0
        for tensor, plain in zip(self.tensors, self.expected):
            with tensor.resident("read") as dense:
                assert torch.equal(dense, plain)
        self.tensors[0].add_(1)
        self.expected[0].add_(1)
        assert torch.equal(self.tensors[0].to("cpu"), self.expected[0])
        assert self.pager.pump.check() == 0


@pytest.fixture(params=SETUPS)
def held(request, tmp_path):
    with open_pager(request.param, tmp_path) as pager:
        holder = Held(pager)
        yield holder
        holder.check()


# Settings. Nothing is made before all of them are valid.


@pytest.mark.parametrize("name", ["device_bytes", "host_bytes", "flash_bytes", "page_bytes"])
@pytest.mark.parametrize(
    "value", ["12 parsecs", "", "MiB", "-1MiB", -4096, float("nan"), object(), True]
)
def test_a_size_that_is_none_is_refused_with_its_name_and_value(tmp_path, name, value):
    settings = {
        "device_bytes": "1MiB",
        "host_bytes": "1MiB",
        "flash_path": tmp_path,
        "flash_bytes": "1MiB",
    }
    with pytest.raises(pagert.ConfigurationError, match=name) as caught:
        pagert.Pager(**{**settings, name: value})
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [0, "0", "0MiB", None])
def test_a_device_budget_of_nothing_is_refused(value):
    with pytest.raises(pagert.ConfigurationError, match="device_bytes"):
        pagert.Pager(device_bytes=value, host_bytes="1MiB")


@pytest.mark.parametrize("value", [0, None])
def test_a_pager_without_a_lower_tier_is_refused(value):
    with pytest.raises(pagert.ConfigurationError, match="host_bytes") as caught:
        pagert.Pager(device_bytes="1MiB", host_bytes=value)
    assert "flash_path" in str(caught.value)


def test_a_budget_beyond_memory_is_refused_when_it_is_mapped():
    with pytest.raises((pagert.ConfigurationError, MemoryError), match="device_bytes"):
        pagert.Pager(device_bytes="1000000TiB", host_bytes="1GiB", page_bytes="1GiB")


# The flash path


def test_a_flash_path_that_is_missing_is_refused(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(
        pagert.ConfigurationError, match="does not exist; create the folder"
    ) as caught:
        open_pager("device+flash", missing)
    assert str(missing) in str(caught.value)


def test_a_flash_path_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("the user's")
    with pytest.raises(pagert.ConfigurationError, match="is not a folder") as caught:
        open_pager("device+flash", file)
    assert str(file) in str(caught.value)
    assert file.read_text() == "the user's"


@contextlib.contextmanager
def mounted(folder: pathlib.Path, *command: str):
    """A small file system, where this process may mount one."""
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no mount command")
    done = subprocess.run(["mount", *command, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is refused here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request, tmp_path):
    """About 12 MiB."""
    if request.param == "tmpfs":
        command = ["-t", "tmpfs", "-o", "size=12m", "none"]
    else:
        image = tmp_path / "image"
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4")
        image.write_bytes(b"")
        os.truncate(image, 16 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
        command = ["-o", "loop", str(image)]
    with mounted(tmp_path / "disk", *command) as folder:
        yield folder


def test_a_flash_path_that_is_read_only_is_refused(tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,ro", "none") as folder:
        with pytest.raises(pagert.ConfigurationError, match="Read-only file system") as caught:
            open_pager("device+flash", folder)
        assert str(folder) in str(caught.value) and "writable" in str(caught.value)


def test_a_flash_path_that_is_full_is_refused_with_what_is_free(small_disk):
    before = os.statvfs(small_disk).f_bavail
    with pytest.raises(OSError, match="lower flash_bytes") as caught:
        open_pager("device+flash", small_disk, flash_bytes="64MiB")
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename) == str(small_disk)
    assert str(64 * MIB) in str(caught.value) and "are free" in str(caught.value)
    assert os.statvfs(small_disk).f_bavail == before
    with open_pager("device+flash", small_disk, flash_bytes="6MiB") as pager:
        Held(pager).check()
    assert os.statvfs(small_disk).f_bavail == before


@pytest.mark.parametrize("setup", ["device+flash", "device+host+flash"])
def test_a_disk_that_others_fill_takes_nothing_from_a_pager_that_runs(small_disk, setup):
    """The space was reserved when the pager was made, where the file system can do that."""
    with open_pager(setup, small_disk, flash_bytes="8MiB") as pager:
        with pytest.raises(OSError, match="No space"):
            (small_disk / "others").write_bytes(b"x" * (16 * MIB))
        Held(pager, 20).check()


def test_a_flash_file_beyond_the_process_limit_is_refused(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, limits[1]))
    try:
        with pytest.raises(OSError, match="RLIMIT_FSIZE") as caught:
            open_pager("device+flash", tmp_path)
        assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with open_pager("device+flash", tmp_path) as pager:
        Held(pager).check()


# Operands


def test_operands_that_do_not_fit_the_device_are_refused_with_what_is_missing(held):
    pager = held.pager
    large = pager.tensor(
        torch.ones(400_000)
    )  # 1.53 MiB: a tensor may be larger than the device tier
    for call in (large.sort, large.resident().__enter__):
        with pytest.raises(pagert.OutOfFrames, match="raise device_bytes") as caught:
            call()
        assert isinstance(caught.value, MemoryError)
        assert caught.value.capacity_bytes == MIB
        assert caught.value.needed_bytes >= 400_000 * 4
        text = str(caught.value)
        assert "400000" in text and "float32" in text and "1 MiB" in text, text
    assert bool((large[:1000].clone() == 1).all())
    held.check()


def test_operands_that_do_not_fit_beside_what_is_held_are_refused(held):
    with held.tensors[0].resident("read"), held.tensors[1].resident("read"):
        with pytest.raises(pagert.OutOfFrames, match="512 KiB of 1 MiB are not pinned"):
            torch.addcmul(held.tensors[2], held.tensors[3], held.tensors[5])
    held.check()


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sparse", lambda: torch.eye(4).to_sparse()),
        ("sparse", lambda: torch.eye(4).to_sparse_csr()),
        ("quantized", lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
        ("meta", lambda: torch.ones(4, device="meta")),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_layout_that_cannot_be_paged_is_refused_by_name(held, kind, make):
    source = make()
    before = held.pager.stats().reserved_bytes
    with pytest.raises(pagert.UnsupportedTensor, match=kind):
        held.pager.tensor(source)
    module = torch.nn.Module()
    module.good = torch.nn.Parameter(torch.ones(5000))
    module.register_buffer("bad", source)
    if kind != "meta":  # those `page_` leaves alone
        with pytest.raises(pagert.UnsupportedTensor, match=kind):
            held.pager.page_(module)
        assert type(module.good) is torch.nn.Parameter, "the module was changed"
    gc.collect()
    assert held.pager.stats().reserved_bytes == before


def test_a_tensor_of_another_pager_is_refused_and_both_go_on(held, tmp_path):
    with open_pager("device+host", tmp_path) as pager:
        other = Held(pager)
        for call in (lambda: held.tensors[0] + other.tensors[0],
                     lambda: held.tensors[0].add_(other.tensors[0]),
                     lambda: torch.add(other.tensors[0], 1, out=held.tensors[0]),
                     lambda: torch._foreach_add_([held.tensors[0]], [other.tensors[0]])):  # fmt: skip
            with pytest.raises(pagert.ForeignTensor, match="two pagers") as caught:
                call()
            assert "pager.tensor(" in str(caught.value)
        moved = held.pager.tensor(other.tensors[1])  # the remedy
        assert torch.equal(moved.to("cpu"), other.expected[1])
        other.check()


# After close()


@pytest.mark.parametrize("setup", SETUPS)
def test_every_use_after_close_is_refused_by_name(setup, tmp_path):
    pager = open_pager(setup, tmp_path)
    module = pager.page_(torch.nn.Linear(100, 100), min_bytes=0)
    tensors = Held(pager).tensors
    module(torch.ones(100)).sum().backward()
    view, context = tensors[0][:10], tensors[1].resident()
    pager.close()
    pager.close()
    assert pager.closed
    calls = {
        "an operator": lambda: tensors[0] + 1,
        "in place": lambda: tensors[0].add_(1),
        "a view": lambda: view.sum(),
        "to another type": lambda: tensors[0].to(torch.float64),
        "to a list": tensors[0].tolist,
        "item": lambda: tensors[0][3].item(),
        "resident": context.__enter__,
        "evict": tensors[0].evict,
        "prefetch": tensors[0].prefetch,
        "tier": lambda: tensors[0].tier,
        "like": lambda: torch.zeros_like(tensors[0]),
        "a module": lambda: module(torch.ones(100)),
        "a gradient": lambda: module.weight.grad.norm(),
        "tensor": lambda: pager.tensor([1.0]),
        "empty": lambda: pager.empty(3),
        "page_": lambda: pager.page_(torch.nn.Linear(2, 2)),
        "unpage_": lambda: pager.unpage_(module),
        "flush": pager.flush,
        "stats": pager.stats,
        "reset_stats": pager.reset_stats,
        "with": pager.__enter__,
    }
    for name, call in calls.items():
        with pytest.raises(pagert.PagerClosed, match="closed"):
            call()
            pytest.fail(f"{name} worked on a closed pager")
    assert "PagedTensor" in repr(tensors[0]) or "tensor" in repr(tensors[0])
    assert tensors[0].shape == (65536,)
    assert os.listdir(tmp_path) == []


def test_close_inside_a_resident_block_is_refused_and_the_block_goes_on(held):
    with held.tensors[0].resident() as dense:
        with pytest.raises(pagert.PagertError, match=r"resident\(\) block"):
            held.pager.close()
        dense += 1
        held.expected[0] += 1
    assert not held.pager.closed


# Full tiers, while running


@pytest.mark.parametrize("setup", SETUPS)
def test_full_tiers_are_told_nothing_is_lost_and_room_that_comes_back_is_used(setup, tmp_path):
    below = {"host_bytes": "2MiB"} if setup == "device+host" else {"flash_bytes": "2MiB"}
    with open_pager(setup, tmp_path, **below) as pager:
        holder = Held(pager, 3)
        with pytest.raises(pagert.TierFull, match="nothing is lost") as caught:
            for k in range(3, 40):
                plain = torch.arange(65536.0) * 3 + k
                tensor = pager.tensor(plain)
                holder.tensors.append(tensor)
                holder.expected.append(plain)
        assert isinstance(caught.value, MemoryError)
        assert "raise" in str(caught.value) and "2 MiB of 2 MiB" in str(caught.value)
        assert len(holder.tensors) >= 8  # 3 MiB in all; the last may have come in part
        caught = None  # its frames hold a tensor that was never finished
        gc.collect()
        for tensor, plain in zip(holder.tensors, holder.expected):
            if tensor.tier == "device":
                assert torch.equal(tensor.to("cpu"), plain)
        for _ in range(4):
            holder.tensors.pop()
            holder.expected.pop()
        del tensor
        holder.check()
        pager.flush()
        holder.tensors += [pager.tensor(torch.ones(65536)) for _ in range(2)]
        holder.expected += [torch.ones(65536) for _ in range(2)]
        holder.check()
