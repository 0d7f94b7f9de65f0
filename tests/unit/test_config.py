# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagert.config import POLICIES, Config, format_bytes, parse_bytes
from pagert.errors import ConfigurationError, ConfigurationTypeError

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4


def resolve(**changes):
    """A configuration that is valid but for `changes`."""
    return Config.resolve(**{"device_bytes": "64MiB", "host_bytes": "256MiB", **changes})


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1KiB", 1024),
        ("512MiB", 536870912),
        ("  2 GiB ", 2147483648),
        ("1TiB", 1099511627776),
        ("3tib", 3298534883328),
        ("1.5GiB", 1610612736),
        ("0.1MiB", 104857),
        ("1KB", 1000),
        ("2MB", 2000000),
        ("64GB", 64000000000),
        ("1TB", 1000000000000),
        ("+5 KiB", 5120),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "12 parsecs",
        "",
        "MiB",
        "1.2.3MiB",
        "1,5GiB",
        "0x10",
        "1e9",
        "nan",
        "inf",
        "1 M",
        "1_000",
        "\uff11GiB",
    ],
)
def test_text_that_is_no_size_is_refused_with_the_units_that_are(text):
    with pytest.raises(ConfigurationError, match="not a size") as raised:
        parse_bytes(text, name="host_bytes")
    message = str(raised.value)
    assert "host_bytes" in message and repr(text) in message and "MiB" in message


def test_text_of_many_digits_is_refused_and_not_converted():
    with pytest.raises(ConfigurationError):
        parse_bytes("9" * 100_000)


@pytest.mark.parametrize("size", [True, False, 1.0, float("nan"), None, b"1MiB", [1], 1 + 0j])
def test_a_size_of_the_wrong_type_is_a_type_error_and_a_configuration_error(size):
    with pytest.raises(ConfigurationTypeError) as raised:
        parse_bytes(size, name="device_bytes")
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ConfigurationError)
    assert type(size).__name__ in str(raised.value)


@pytest.mark.parametrize("size", [-1, "-1", "-4KiB", 2**63, "8388608TiB"])
def test_sizes_out_of_range_are_refused(size):
    with pytest.raises(ConfigurationError):
        parse_bytes(size)


def test_integers_of_other_libraries_are_sizes():
    class Eight:
        def __index__(self):
            return 8

    assert parse_bytes(Eight()) == 8


@given(st.integers(0, 2**63 - 1))
def test_a_size_written_in_bytes_reads_back(size_bytes):
    assert parse_bytes(str(size_bytes)) == parse_bytes(f"{size_bytes}B") == size_bytes


@given(st.integers(0, 2**60))
def test_a_formatted_size_reads_back_within_its_two_digits(size_bytes):
    written = format_bytes(size_bytes)
    unit_bytes = parse_bytes("1" + written.split()[1])
    assert abs(parse_bytes(written) - size_bytes) <= unit_bytes // 200 + 1
    assert unit_bytes == TIB or float(written.split()[0]) < 1024


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (100 * MIB, "100 MiB"),
        (1_600_000, "1.53 MiB"),
        (MIB - 1, "1 MiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (5000 * TIB, "5000 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit_they_fill(size_bytes, text):
    assert format_bytes(size_bytes) == text


def test_two_tiers_without_flash():
    config = Config.resolve(device_bytes="64MiB", host_bytes="256MiB")
    assert config.device == torch.device("cpu")
    assert config.page_bytes == 256 * KIB
    assert (config.device_frames, config.host_frames, config.flash_frames) == (256, 1024, 0)
    assert config.flash_path is None


@pytest.mark.parametrize("host_bytes", [None, 0, "0", "0 GiB"])
def test_no_host_budget_means_no_host_tier(tmp_path, host_bytes):
    config = Config.resolve(
        device_bytes=64 * MIB, host_bytes=host_bytes, flash_path=tmp_path, flash_bytes="1GiB"
    )
    assert (config.host_bytes, config.host_frames) == (0, 0)
    assert config.flash_frames == 4096
    assert config.flash_path == str(tmp_path)


def test_budgets_are_rounded_down_to_whole_pages(tmp_path):
    config = Config.resolve(
        device_bytes=10 * 4096 + 4095,
        host_bytes=20 * 4096 + 1,
        flash_path=tmp_path,
        flash_bytes=30 * 4096,
        page_bytes=4096,
    )
    assert config.device_bytes == 10 * 4096
    assert config.host_bytes == 20 * 4096
    assert config.flash_bytes == 30 * 4096


@pytest.mark.parametrize(
    ("device_bytes", "page_bytes"),
    [
        ("1TiB", 256 * KIB),
        ("16MiB", 256 * KIB),
        (16 * MIB - 1, 128 * KIB),
        ("1MiB", 16 * KIB),
        ("256KiB", 4 * KIB),
        (4096, 4096),
    ],
)
def test_default_page_is_smaller_where_few_would_fit(device_bytes, page_bytes):
    assert resolve(device_bytes=device_bytes).page_bytes == page_bytes


@pytest.mark.parametrize("page_bytes", [4096, "64KiB", 1024 * MIB])
def test_page_size_can_be_chosen(page_bytes):
    config = resolve(device_bytes="4GiB", host_bytes="4GiB", page_bytes=page_bytes)
    assert config.page_bytes == parse_bytes(page_bytes)


@pytest.mark.parametrize("page_bytes", [0, 1, 2048, 4095, 4097, 12288, 2 * GIB, "1MB"])
def test_page_size_must_be_a_power_of_two_in_range(page_bytes):
    with pytest.raises(ConfigurationError, match="power of two"):
        resolve(device_bytes="4GiB", host_bytes="4GiB", page_bytes=page_bytes)


@pytest.mark.parametrize("name", ["device_bytes", "host_bytes", "flash_bytes"])
def test_a_budget_below_one_page_is_refused_with_the_page_size(tmp_path, name):
    budgets = {"device_bytes": "64KiB", "host_bytes": "64KiB", "flash_bytes": "64KiB", name: 8191}
    with pytest.raises(ConfigurationError, match=f"{name} is 8191 bytes.*8192") as raised:
        Config.resolve(page_bytes=8192, flash_path=tmp_path, **budgets)
    assert f"raise {name} or lower page_bytes" in str(raised.value)


@pytest.mark.parametrize("device_bytes", [0, -1, "-1GiB", "0MiB", 4095])
def test_a_device_budget_of_no_page_is_refused(device_bytes):
    with pytest.raises(ConfigurationError, match="device_bytes"):
        resolve(device_bytes=device_bytes)


@pytest.mark.parametrize("name", ["host_bytes", "flash_bytes"])
@pytest.mark.parametrize("size", [-1, True, float("nan"), "12 parsecs"])
def test_bad_budgets_below_the_device_are_refused_by_name(tmp_path, name, size):
    with pytest.raises(ConfigurationError, match=name):
        resolve(flash_path=tmp_path, **{"flash_bytes": "1GiB", name: size})


def test_a_pager_without_a_tier_below_the_device_is_refused():
    with pytest.raises(ConfigurationError, match=r"host_bytes.*flash_path"):
        Config.resolve(device_bytes="64MiB")


@pytest.mark.parametrize("flash_bytes", [None, 0, "0"])
def test_a_flash_folder_without_a_budget_is_refused(tmp_path, flash_bytes):
    with pytest.raises(ConfigurationError, match="flash_bytes"):
        resolve(flash_path=tmp_path, flash_bytes=flash_bytes)


def test_a_flash_budget_without_a_folder_is_refused():
    with pytest.raises(ConfigurationError, match="flash_path"):
        resolve(flash_bytes="1GiB")


def test_a_missing_flash_folder_is_refused(tmp_path):
    folder = tmp_path / "missing"
    with pytest.raises(ConfigurationError, match="does not exist") as raised:
        resolve(flash_path=folder, flash_bytes="1GiB")
    assert str(folder) in str(raised.value)
    assert not folder.exists()


def test_a_flash_path_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(ConfigurationError, match="not a folder"):
        resolve(flash_path=str(file), flash_bytes="1GiB")


def test_a_flash_folder_that_cannot_be_written_to_is_refused(tmp_path):
    if os.geteuid() != 0:
        folder = tmp_path / "read-only"
        folder.mkdir()
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    else:
        # Permission bits do not stop root; the kernel's own file system does.
        folder = pathlib.Path("/proc")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        resolve(flash_path=folder, flash_bytes="1GiB")


@pytest.mark.parametrize("path", ["", "nul\0byte"])
def test_a_flash_path_that_cannot_be_a_path_is_refused(path):
    with pytest.raises(ConfigurationError, match="flash_path"):
        resolve(flash_path=path, flash_bytes="1GiB")


@pytest.mark.parametrize("path", [1, 1.5, True, ["/tmp"]])
def test_a_flash_path_of_the_wrong_type_is_refused(path):
    with pytest.raises(ConfigurationTypeError, match="flash_path"):
        resolve(flash_path=path, flash_bytes="1GiB")


def test_a_relative_flash_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flash").mkdir()
    assert resolve(flash_path="flash", flash_bytes="1GiB").flash_path == str(tmp_path / "flash")


@pytest.mark.parametrize("device", ["auto", "cpu", torch.device("cpu"), "cpu:0"])
def test_the_cpu_is_the_device(device):
    assert resolve(device=device).device == torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda:1"), "mps", "meta"])
def test_devices_other_than_the_cpu_are_refused_by_name(device):
    with pytest.raises(ConfigurationError, match="CPU only") as raised:
        resolve(device=device)
    assert str(device) in str(raised.value)


@pytest.mark.parametrize("device", ["", "gpu0", "cpu:x", "12 parsecs"])
def test_unknown_devices_are_refused(device):
    with pytest.raises(ConfigurationError, match="device"):
        resolve(device=device)


@pytest.mark.parametrize("device", [None, 0, True, b"cpu"])
def test_a_device_of_the_wrong_type_is_refused(device):
    with pytest.raises(ConfigurationTypeError, match="device"):
        resolve(device=device)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("policy", POLICIES),
        ("direct", ("auto", "require", "off")),
        ("io_backend", ("auto", "io_uring", "threads")),
    ],
)
def test_unknown_names_are_refused_with_those_that_exist(name, allowed):
    for choice in allowed:
        assert getattr(resolve(**{name: choice}), name) == choice
    with pytest.raises(ConfigurationError) as raised:
        resolve(**{name: "belady's dream"})
    assert all(repr(choice) in str(raised.value) for choice in allowed)
    with pytest.raises(ConfigurationTypeError, match=name):
        resolve(**{name: None})


@pytest.mark.parametrize("name", ["deadline_seconds", "warn_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 10**400])
def test_limits_in_time_are_positive_and_finite(name, seconds):
    with pytest.raises(ConfigurationError, match=name):
        resolve(**{name: seconds})


@pytest.mark.parametrize("seconds", [True, "1", None])
def test_limits_in_time_are_numbers(seconds):
    with pytest.raises(ConfigurationTypeError, match="deadline_seconds"):
        resolve(deadline_seconds=seconds)


@pytest.mark.parametrize(
    ("name", "count"),
    [("flash_depth", -1), ("flash_depth", 4097), ("copy_threads", 0), ("copy_threads", 65)],
)
def test_counts_out_of_range_are_refused_with_the_range(name, count):
    with pytest.raises(ConfigurationError, match=rf"{name} is {count}; give a number from"):
        resolve(**{name: count})


@pytest.mark.parametrize("count", [True, 1.0, "1", None])
def test_counts_are_whole_numbers(count):
    with pytest.raises(ConfigurationTypeError, match="copy_threads"):
        resolve(copy_threads=count)


def test_more_frames_than_the_core_can_count_are_refused():
    with pytest.raises(ConfigurationError, match="raise page_bytes"):
        resolve(host_bytes="16TiB", page_bytes=4096)


def test_there_are_more_virtual_pages_than_frames_and_never_too_many():
    config = resolve()
    assert config.page_count == 4 * (256 + 1024) + 1024**2
    large = resolve(host_bytes="8TiB", page_bytes=4096)
    assert large.page_count == 2**32 - 2


@pytest.mark.parametrize(("page_bytes", "pages"), [(4096, 4096), ("256KiB", 64), ("1GiB", 1)])
def test_transfers_join_pages_up_to_one_size(page_bytes, pages):
    config = resolve(device_bytes="4GiB", host_bytes="4GiB", page_bytes=page_bytes)
    assert config.transfer_pages_max == pages


def test_a_configuration_cannot_be_changed():
    config = resolve()
    with pytest.raises(AttributeError):
        config.device_bytes = 1


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(TypeError, match="device_byte"):
        Config.resolve(device_byte=1)
