# SPDX-License-Identifier: Apache-2.0
"""Opening on every kind of folder: the right exception with a remedy, and fallbacks that say so."""

from __future__ import annotations

import errno
import os
import resource
import subprocess

import pytest

from pagert.engines import open_flash

KIB, MIB = 1 << 10, 1 << 20


def round_trip(file) -> None:
    data, back = os.urandom(256 * KIB), bytearray(256 * KIB)
    file.write(data, 0)
    file.read(back, 0)
    assert back == data


def fill_disk(folder) -> None:
    """Write a file `full` until the disk is full."""
    fd = os.open(folder / "full", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(MIB))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_bytes": 0},
        {"block_bytes": 1000},
        {"block_bytes": -4096},
        {"capacity_bytes": 0},
        {"capacity_bytes": 4096 * 3 + 1},
        {"capacity_bytes": 1 << 63},
        {"depth": -1},
        {"depth": 5000},
        {"request_bytes": 1 << 31},
        {"backend": "aio"},
        {"direct": "maybe"},
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(tmp_path, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        open_flash(tmp_path, **{"capacity_bytes": MIB, "block_bytes": 4096} | wrong)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="create it first") as caught:
        open_flash(tmp_path / "missing", capacity_bytes=MIB, block_bytes=4096)
    assert caught.value.filename == str(tmp_path / "missing")


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="needs a folder") as caught:
        open_flash(tmp_path / "file", capacity_bytes=MIB, block_bytes=4096)
    assert caught.value.filename == str(tmp_path / "file")


def test_a_read_only_file_system_is_named(mounted):
    folder = mounted("tmpfs", "-o", "ro,size=8m")
    with pytest.raises(OSError, match="can be written to") as caught:
        open_flash(folder, capacity_bytes=MIB, block_bytes=4096)
    assert caught.value.errno == errno.EROFS
    assert caught.value.filename == str(folder)


def test_a_folder_without_permission_is_named(tmp_path, run_script):
    tmp_path.chmod(0o555)
    out = run_script(
        """
os.setuid(65534) if os.geteuid() == 0 else None
try:
    FlashFile(sys.argv[1], capacity_bytes=4096, block_bytes=4096)
except OSError as error:
    print(errno.errorcode[error.errno], error.filename == sys.argv[1])
""",
        str(tmp_path),
    )
    assert out.split() == ["EACCES", "True"]


@pytest.mark.parametrize("reserve", [True, False])
def test_too_little_space_shows_at_once_with_both_sizes(tmp_path, reserve):
    capacity = 1 << 50
    with pytest.raises(OSError, match=rf"needs {capacity} bytes, \d+ are free") as caught:
        open_flash(tmp_path, capacity_bytes=capacity, block_bytes=4096, reserve=reserve)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)


def test_a_disk_that_fills_up_later_fails_the_write_and_goes_on_when_space_is_back(mounted):
    folder = mounted("ext4", "-o", "loop", image_bytes=32 * MIB)
    data = os.urandom(64 * KIB)
    with open_flash(folder, capacity_bytes=8 * MIB, block_bytes=64 * KIB, reserve=False) as file:
        file.write(data, 0)
        fill_disk(folder)
        failed = []
        for offset in range(64 * KIB, 8 * MIB, 64 * KIB):
            try:
                file.write(data, offset)
            except OSError as error:
                failed.append((offset, error.errno, error.filename))
        assert {(code, name) for _, code, name in failed} == {(errno.ENOSPC, str(folder))}
        back = bytearray(64 * KIB)
        file.read(back, 0)
        assert back == data
        with pytest.raises(OSError, match="never written"):
            file.read(back, failed[0][0])
        os.unlink(folder / "full")
        file.write(data, failed[0][0])
        file.read(back, failed[0][0])
        assert back == data


def test_reserved_space_survives_a_full_disk(mounted):
    folder = mounted("ext4", "-o", "loop", image_bytes=32 * MIB)
    with open_flash(folder, capacity_bytes=4 * MIB, block_bytes=64 * KIB) as file:
        assert file.info["reserved"]
        fill_disk(folder)
        data, back = os.urandom(4 * MIB), bytearray(4 * MIB)
        file.write(data, 0)
        file.read(back, 0)
        assert back == data


def test_sectors_of_4096_bytes_are_respected(mounted, tmp_path):
    image = tmp_path / "sectors"
    with open(image, "wb") as file:
        file.truncate(32 * MIB)
    made = subprocess.run(
        ["losetup", "--find", "--show", "--direct-io=on", "--sector-size", "4096", str(image)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"loop devices are not allowed here: {made.stderr.strip()}")
    device = made.stdout.strip()
    folder = tmp_path / "folder"
    folder.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", device], check=True)
        done = subprocess.run(["mount", device, str(folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        with open_flash(folder, capacity_bytes=8 * MIB, block_bytes=4096) as file:
            assert file.info["direct"]
            assert file.info["offset_alignment"] == 4096
            round_trip(file)
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)
        subprocess.run(["losetup", "--detach", device], capture_output=True)


def test_a_folder_in_memory_is_warned_about(mounted, caplog):
    folder = mounted("tmpfs", "-o", "size=16m")
    with open_flash(folder, capacity_bytes=MIB, block_bytes=4096) as file:
        round_trip(file)
    assert [r.levelname for r in caplog.records if "lies in memory (tmpfs)" in r.message] == [
        "WARNING"
    ]


def test_a_full_memory_file_system_shows_at_once(mounted):
    folder = mounted("tmpfs", "-o", "size=1m")
    with pytest.raises(OSError, match="needs 8388608 bytes, 1048576 are free") as caught:
        open_flash(folder, capacity_bytes=8 * MIB, block_bytes=4096)
    assert caught.value.errno == errno.ENOSPC


FALLBACK = """
import ctypes, logging
numbers = {"setup": 425, "enter": 426, "register": 427}
deny(numbers[sys.argv[2]], getattr(errno, sys.argv[3]))
with FlashFile(sys.argv[1], capacity_bytes=1 << 20, block_bytes=4096) as file:
    assert file.info["direct"]
    data, back = os.urandom(1 << 20), bytearray(1 << 20)
    file.write(data, 0)
    file.read(back, 0)
    print(file.info["backend"], errno.errorcode[file.info["uring_errno"]], back == data)
try:
    FlashFile(sys.argv[1], capacity_bytes=1 << 20, block_bytes=4096, backend="io_uring")
except OSError as error:
    print(errno.errorcode[error.errno])
"""


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("setup", "EPERM"),
        ("setup", "ENOSYS"),
        ("setup", "ENOMEM"),
        ("enter", "EPERM"),
        ("enter", "ENOSYS"),
        ("register", "EPERM"),
    ],
)
def test_where_io_uring_is_refused_threads_do_the_same_work(tmp_path, run_script, call, code):
    with open_flash(tmp_path, capacity_bytes=MIB, block_bytes=4096) as file:
        if not file.info["direct"]:
            pytest.skip(f"the file system of {tmp_path} refuses direct I/O")
    out = run_script(FALLBACK, str(tmp_path), call, code)
    assert out.split() == ["threads", code, "True", code]


def test_the_message_of_refused_io_uring_names_seccomp_and_the_remedy(tmp_path, run_script):
    out = run_script(
        """
import logging
from pagert.engines import open_flash
deny(425, errno.EPERM)
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
with open_flash(sys.argv[1], capacity_bytes=1 << 20, block_bytes=4096) as file:
    assert file.info["backend"] == "threads"
try:
    open_flash(sys.argv[1], capacity_bytes=1 << 20, block_bytes=4096, backend="io_uring")
except PermissionError as error:
    print(error)
""",
        str(tmp_path),
    )
    warning, message = out.splitlines()
    assert warning.startswith("WARNING") and "seccomp" in warning and "threads" in warning
    assert "seccomp" in message and "backend='auto'" in message


@pytest.mark.parametrize("direct", ["auto", "require"])
def test_where_direct_io_is_refused_buffered_io_does_the_same_work(tmp_path, run_script, direct):
    out = run_script(
        """
import platform
number = {"x86_64": 72, "aarch64": 25}.get(platform.machine())
if number is None:
    print("SKIP: number of fcntl unknown for", platform.machine()); raise SystemExit(77)
deny(number, errno.EINVAL, 2, os.O_DIRECT)
try:
    with FlashFile(sys.argv[1], capacity_bytes=1 << 20, block_bytes=4096,
                   direct=sys.argv[2]) as file:
        data, back = os.urandom(1 << 20), bytearray(1 << 20)
        file.write(data, 0)
        file.read(back, 0)
        info = file.info
        print(info["direct"], errno.errorcode[info["direct_errno"]], info["backend"], back == data)
except OSError as error:
    print(errno.errorcode[error.errno])
""",
        str(tmp_path),
        direct,
    )
    expected = ["EINVAL"] if direct == "require" else ["False", "EINVAL", "threads", "True"]
    assert out.split() == expected


@pytest.mark.parametrize("limit", [0, 64 * KIB])
def test_a_small_limit_of_locked_memory_is_enough(tmp_path, run_script, limit):
    out = run_script(
        """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]),) * 2)
os.chdir(sys.argv[1])  # the folders above it may be closed to others
os.setuid(65534) if os.geteuid() == 0 else None  # root may lock what it likes
with FlashFile(".", capacity_bytes=1 << 20, block_bytes=4096) as file:
    back = bytearray(1 << 20)
    file.write(b"x" * (1 << 20), 0)
    file.read(back, 0)
    print(back == b"x" * (1 << 20))
""",
        str(_open_to_all(tmp_path)),
        str(limit),
    )
    assert out.split() == ["True"]


def _open_to_all(folder):
    """The folder and those above it that pytest made can be entered by other users."""
    for parent in (folder, *folder.parents[:3]):
        if parent.name.startswith(("pytest", "test_")):
            parent.chmod(0o777)
    return folder


def test_the_limit_of_file_sizes_is_an_error_and_not_a_signal(tmp_path, run_script):
    out = run_script(
        """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    FlashFile(sys.argv[1], capacity_bytes=2 << 20, block_bytes=4096)
except OSError as error:
    print(errno.errorcode[error.errno])
""",
        str(tmp_path),
    )
    assert out.split() == ["EFBIG"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(OSError, match=f"needs {2 * MIB} bytes, .* {MIB} .*ulimit -f"):
            open_flash(tmp_path, capacity_bytes=2 * MIB, block_bytes=4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
