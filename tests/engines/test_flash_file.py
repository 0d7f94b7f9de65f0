# SPDX-License-Identifier: Apache-2.0
"""The flash engine through real files: bytes, checksums, privacy, forks."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import threading

import pytest

from pagert._core.flash import FlashFile

KIB, MIB = 1 << 10, 1 << 20
WAYS = [(backend, direct) for backend in ("io_uring", "threads") for direct in ("auto", "off")]


def open_file(folder, **options):
    options = {"capacity_bytes": 4 * MIB, "block_bytes": 4 * KIB, "reserve": False} | options
    try:
        return FlashFile(str(folder), **options)
    except OSError as error:
        if options.get("backend") == "io_uring" and error.errno in (errno.EPERM, errno.ENOSYS):
            pytest.skip(f"io_uring is not allowed here: {error}")
        raise


def descriptor_of(file: FlashFile) -> str:
    """Path of the one descriptor of this process that is an unlinked file in the file's folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if target.startswith(file.folder + "/") and target.endswith(" (deleted)"):
            found.append(path)
    (path,) = found
    return path


def flip_byte(file: FlashFile, offset: int) -> None:
    fd = os.open(descriptor_of(file), os.O_RDWR)
    byte = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte[0] ^ 0x10]), offset)
    os.fsync(fd)
    os.close(fd)


@pytest.mark.parametrize(("backend", "direct"), WAYS)
@pytest.mark.parametrize(
    ("block", "request_bytes", "depth"),
    [
        (4096, 0, 0),
        (4096, 12_288, 3),
        (65_536, 16_384, 2),
        (20_480, 8_192, 5),
        (1 << 18, 1 << 20, 4),
    ],
)
def test_random_writes_and_reads_equal_a_plain_array(
    tmp_path, aligned, backend, direct, block, request_bytes, depth
):
    seed = block + request_bytes
    print(f"seed {seed}")
    draw = random.Random(seed)
    blocks = 40
    oracle = bytearray(blocks * block)
    written = [False] * blocks
    memory = aligned((blocks + 2) * block)
    options = {"request_bytes": request_bytes, "depth": depth, "backend": backend, "direct": direct}
    with open_file(tmp_path, capacity_bytes=blocks * block, block_bytes=block, **options) as file:
        assert file.info["backend"] == backend
        for _ in range(60):
            first = draw.randrange(blocks)
            count = draw.randint(1, blocks - first)
            offset, size = first * block, count * block
            view = memory[block : block + size]
            if draw.random() < 0.5:
                data = draw.randbytes(size)
                view[:] = data
                oracle[offset : offset + size] = data
                written[first : first + count] = [True] * count
                assert file.run([("write", view, offset)]) == [(0, 0)]
                continue
            view[:] = b"\xcc" * size
            memory[:block] = b"\xa5" * block
            memory[block + size : block + size + 4096] = b"\x5a" * 4096
            ((result, failed),) = file.run([("read", view, offset)])
            if all(written[first : first + count]):
                assert result == 0
                assert view == oracle[offset : offset + size]
            else:
                hole = written.index(False, first, first + count)
                assert result == -errno.ENODATA
                assert hole * block <= failed < offset + size
            assert memory[:block] == b"\xa5" * block
            assert memory[block + size : block + size + 4096] == b"\x5a" * 4096


@pytest.mark.parametrize(("backend", "direct"), WAYS)
def test_more_requests_than_the_queue_holds_all_come_back_right(tmp_path, aligned, backend, direct):
    count = 500
    source, target = aligned(count * 4096), aligned(count * 4096)
    source[:] = random.Random(1).randbytes(count * 4096)
    order = random.Random(2).sample(range(count), count)
    with open_file(tmp_path, backend=backend, direct=direct, depth=2) as file:
        pieces = [(slice(k * 4096, (k + 1) * 4096), (count - 1 - k) * 4096) for k in order]
        assert all(r == 0 for r, _ in file.run([("write", source[s], o) for s, o in pieces]))
        assert all(r == 0 for r, _ in file.run([("read", target[s], o) for s, o in pieces]))
    assert source == target


def test_buffers_of_any_alignment_are_read_and_written(tmp_path):
    data = random.Random(3).randbytes(64 * KIB)
    with open_file(tmp_path) as file:
        for shift in (0, 1, 8, 100, 511):
            source = bytes(shift) + data
            file.write(memoryview(source)[shift:], 8192)
            target = bytearray(shift + len(data) + 1)
            file.read(memoryview(target)[shift:-1], 8192)
            assert target == bytes(shift) + data + b"\0"


def test_neighbours_of_a_written_block_stay(tmp_path):
    with open_file(tmp_path) as file:
        file.write(b"\x11" * (64 * KIB), 0)
        for block in random.Random(4).sample(range(16), 8):
            file.write(b"\x22" * 4096, block * 4096)
            whole = bytearray(64 * KIB)
            file.read(whole, 0)
            assert whole[block * 4096 : (block + 1) * 4096] == b"\x22" * 4096
            file.write(b"\x11" * 4096, block * 4096)
            file.read(whole, 0)
            assert whole == b"\x11" * (64 * KIB)


def test_offsets_beyond_four_gibibytes_do_not_wrap(tmp_path):
    capacity = (1 << 32) + MIB
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize < capacity:
        pytest.skip(f"less than {capacity} bytes are free in {tmp_path}")
    with open_file(tmp_path, capacity_bytes=capacity, block_bytes=64 * KIB) as file:
        file.write(b"\x01" * (64 * KIB), 0)
        file.write(b"\x02" * (64 * KIB), 1 << 32)
        low, high = bytearray(64 * KIB), bytearray(64 * KIB)
        file.read(low, 0)
        file.read(high, 1 << 32)
        assert low == b"\x01" * (64 * KIB)
        assert high == b"\x02" * (64 * KIB)


@pytest.mark.parametrize(("backend", "direct"), WAYS)
def test_a_flipped_byte_on_flash_is_found_and_placed(tmp_path, aligned, backend, direct):
    memory = aligned(64 * KIB)
    memory[:] = random.Random(6).randbytes(64 * KIB)
    good = bytes(memory)
    with open_file(tmp_path, backend=backend, direct=direct) as file:
        file.write(memory, 0)
        flip_byte(file, 5 * 4096 + 1234)
        assert file.run([("read", memory, 0)]) == [(-errno.EBADMSG, 5 * 4096)]
        with pytest.raises(OSError, match=r"checksum.*20480") as caught:
            file.read(memory, 0)
        assert caught.value.errno == errno.EBADMSG
        assert caught.value.filename == file.folder
        file.read(memory[:4096], 4 * 4096)  # the others are fine
        assert memory[:4096] == good[4 * 4096 : 5 * 4096]
        file.write(good[5 * 4096 : 6 * 4096], 5 * 4096)  # and writing heals
        file.read(memory, 0)
        assert memory == good


def test_the_lowest_failed_offset_is_reported(tmp_path, aligned):
    memory = aligned(64 * KIB)
    with open_file(tmp_path, request_bytes=4096, depth=16) as file:
        file.write(memory, 0)
        flip_byte(file, 9 * 4096)
        flip_byte(file, 2 * 4096 + 5)
        flip_byte(file, 12 * 4096)
        assert file.run([("read", memory, 0)]) == [(-errno.EBADMSG, 2 * 4096)]


def test_a_block_that_was_never_written_is_not_read_as_zeros(tmp_path):
    with open_file(tmp_path) as file, pytest.raises(OSError, match="never written") as caught:
        file.read(bytearray(4096), 4096)
    assert caught.value.errno == errno.ENODATA


def test_requests_that_do_not_fit_the_file_are_refused(tmp_path, aligned):
    memory = aligned(8192)
    with open_file(tmp_path, capacity_bytes=16 * KIB) as file:
        for view, offset in [
            (memory[:4096], 1),
            (memory[:100], 0),
            (memory, 12 * KIB),
            (memory, 1 << 40),
            (memory, (1 << 64) - 4096),
        ]:
            assert file.run([("write", view, offset)])[0][0] == -errno.EINVAL
            with pytest.raises(ValueError, match=str(offset)):
                file.write(view, offset)
        if file.info["direct"]:
            assert file.run([("write", memory[1:4097], 0)])[0][0] == -errno.EINVAL
        assert file.run([("write", memory[:0], 0)]) == [(0, 0)]
        file.write(memory, 8 * KIB)


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_threads_take_turns(tmp_path, backend):
    failures = []
    with open_file(tmp_path, backend=backend) as file:

        def work(number: int) -> None:
            data, back = bytes([number]) * 32_768, bytearray(32_768)
            for _ in range(20):
                file.write(data, number * 32_768)
                file.read(back, number * 32_768)
                if back != data:
                    failures.append(number)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_the_file_has_no_name_and_one_reader(tmp_path):
    with open_file(tmp_path, reserve=True) as file:
        assert os.listdir(tmp_path) == []
        facts = os.stat(descriptor_of(file))
        assert facts.st_nlink == 0
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_size == 4 * MIB
        assert facts.st_blocks * 512 >= 4 * MIB  # reserved
    assert os.listdir(tmp_path) == []


def test_the_file_cannot_be_given_a_name_later(tmp_path):
    with open_file(tmp_path) as file:
        with pytest.raises(OSError, match=r".*"):
            os.link(descriptor_of(file), tmp_path / "named", follow_symlinks=True)
        assert os.listdir(tmp_path) == []


def test_without_nameless_files_the_name_is_gone_at_once(tmp_path, run_script):
    out = run_script(
        """
import platform
openat = {"x86_64": 257, "aarch64": 56}.get(platform.machine())
if openat is None:
    print("SKIP: number of openat unknown for", platform.machine()); raise SystemExit(77)
deny(openat, errno.EOPNOTSUPP, 2, os.O_TMPFILE)
with FlashFile(sys.argv[1], capacity_bytes=1 << 20, block_bytes=4096) as file:
    print(os.listdir(sys.argv[1]))
    paths = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    (path,) = [p for p in paths if os.path.exists(p) and ".pagert-" in os.readlink(p)]
    print(os.stat(path).st_nlink, oct(os.stat(path).st_mode & 0o777))
    file.write(b"x" * 4096, 0)
    back = bytearray(4096)
    file.read(back, 0)
    print(back == b"x" * 4096)
""",
        str(tmp_path),
    )
    assert out.splitlines() == ["[]", "0 0o600", "True"]


def test_nothing_is_left_after_sigkill(tmp_path, run_script):
    out = run_script(
        """
import signal
ready, tell = os.pipe()
child = os.fork()
if not child:
    file = FlashFile(sys.argv[1], capacity_bytes=1 << 20, block_bytes=4096)
    file.write(b"x" * (1 << 20), 0)
    os.write(tell, b"1")
    signal.pause()
os.read(ready, 1)
print(os.listdir(sys.argv[1]))
os.kill(child, signal.SIGKILL)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.listdir(sys.argv[1]))
""",
        str(tmp_path),
    )
    assert out.splitlines() == ["[]", f"{-signal.SIGKILL} []"]


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path, backend, run_script):
    out = run_script(
        """
try:
    file = FlashFile(sys.argv[1], capacity_bytes=1 << 20, block_bytes=4096, backend=sys.argv[2])
except OSError as error:
    print("SKIP:", error); raise SystemExit(77)
engine = CopyEngine(2)
file.write(b"a" * 8192, 0)
child = os.fork()
if not child:
    refused = 0
    for call in (lambda: file.write(b"b" * 4096, 0), lambda: file.read(bytearray(4096), 0),
                 lambda: engine.run([("fill", bytearray(10), None)])):
        try:
            call()
        except OSError as error:
            refused += error.errno == errno.EPERM
    file.close()
    engine.close()
    os._exit(refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
back = bytearray(8192)
file.read(back, 0)
print(back == b"a" * 8192, engine.run([("fill", back, None)]), back == bytes(8192))
""",
        str(tmp_path),
        backend,
    )
    assert out.splitlines() == ["3", "True [0] True"]


def test_close_is_idempotent_and_gives_the_descriptors_back(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for backend in ("auto", "threads"):
        file = open_file(tmp_path, backend=backend)
        file.close()
        file.close()
        assert file.closed
        with pytest.raises(ValueError, match="closed"):
            file.read(bytearray(4096), 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_opening_that_fails_leaves_no_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r".*"):
        FlashFile(str(tmp_path), capacity_bytes=1 << 60, block_bytes=4096)
    with pytest.raises(OSError, match=r".*"):
        FlashFile(str(tmp_path / "missing"), capacity_bytes=4096, block_bytes=4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_ctrl_c_ends_a_batch_and_the_file_stays_usable(tmp_path, run_script):
    out = run_script(
        """
import mmap, signal, threading
size = 64 << 20
memory = memoryview(mmap.mmap(-1, size))
requests = [("write", memory[k:k + 4096], k) for k in range(0, size, 4096)]
with FlashFile(sys.argv[1], capacity_bytes=size, block_bytes=4096, depth=1) as file:
    file.run(requests[:1])
    started = threading.Event()
    interrupted = 0
    def interrupt():
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        started.set()
        while True:
            file.run(requests)
    except KeyboardInterrupt:
        interrupted += 1
    thread.join()
    back = bytearray(4096)
    file.read(back, 0)
    print(interrupted)
""",
        str(tmp_path),
    )
    assert out.split() == ["1"]
