# SPDX-License-Identifier: Apache-2.0
"""What pagert.save writes is read by the safetensors library; a save is whole or it is not there."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import pathlib
import signal
import subprocess

import pytest
import torch

import pagert
import pagert.files.parts as parts_module
from pagert.errors import ConfigurationError, UnsupportedOperator, UnsupportedTensor
from pagert.files.safetensors import DTYPE_NAMES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
safetensors = pytest.importorskip("safetensors.torch", reason="the extra 'demo' is not installed")


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    kinds = [
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)
    ]
    assert torch.equal(*kinds), name


def test_paged_model_is_read_by_the_library_bit_for_bit(make_pager, make_net, tmp_path):
    plain = make_net()
    with torch.no_grad():
        plain.layers[0].weight[0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    model = make_pager(device_bytes=32 << 10).page_(make_net(), min_bytes=0)
    model.load_state_dict(plain.state_dict())
    pagert.save(model, tmp_path / "model.safetensors", metadata={"step": "3"})
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    expected = dict(plain.state_dict())
    del expected["head.weight"]  # D3, A10: tied tensors are stored once
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(loaded[name], tensor, name)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "3" and file.metadata()["format"] == "pt"


def test_library_loads_a_tied_model_by_its_own_rule(pager, make_net, tmp_path):
    plain, other = make_net(), make_net(1)
    pagert.save(pager.page_(make_net(), min_bytes=0), tmp_path / "model.safetensors")
    safetensors.load_model(other, tmp_path / "model.safetensors")
    for name, tensor in plain.state_dict().items():
        assert_same_bits(other.state_dict()[name], tensor, name)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_and_shape_is_written(dtype, pager, tmp_path):
    raw = torch.randint(0, 2, (6, 4), generator=torch.Generator().manual_seed(0))
    plain = {"matrix": raw.to(dtype), "scalar": raw[0, 0].to(dtype), "none": raw[:0].to(dtype)}
    plain["strided"] = plain["matrix"].t()
    plain["holes"] = plain["matrix"][::2, 1:3]
    mixed = {f"paged {name}": pager.tensor(tensor) for name, tensor in plain.items()} | plain
    pagert.save(mixed, tmp_path / "all.safetensors")
    loaded = safetensors.load_file(tmp_path / "all.safetensors")
    for name, tensor in plain.items():
        assert_same_bits(loaded[name], tensor, name)
        assert_same_bits(loaded[f"paged {name}"], tensor, name)


def test_views_of_one_slab_are_each_written_with_their_own_bytes_only(pager, tmp_path):
    """D8, D3: different tensors of one region are not shared; the file has the sum of their bytes."""
    slab = pager.tensor(torch.arange(40_000.0))
    views = {"a": slab[:100], "b": slab[50:150].view(10, 10).t(), "c": slab[39_000:].expand(2, -1)}
    pagert.save(views, tmp_path / "views.safetensors")
    assert (tmp_path / "views.safetensors").stat().st_size < 4 * (100 + 100 + 2000) + 1000
    for name, tensor in safetensors.load_file(tmp_path / "views.safetensors").items():
        assert_same_bits(tensor, views[name].clone(), name)


def test_no_more_than_a_part_is_held_outside_of_pages(pager, tmp_path, monkeypatch):
    """D5: a save of what is larger than the device tier holds one part of one tensor."""
    real, sizes = parts_module.Staging.like, []

    def spying(staging, view, dtype):
        sizes.append(view.numel() * dtype.itemsize)
        return real(staging, view, dtype)

    monkeypatch.setattr(parts_module.Staging, "like", spying)
    large = pager.tensor(torch.randn(600, 1000))
    tensors = {"large": large, "transposed": large.t(), "block": large[:, 3:900]}
    pagert.save(tensors, tmp_path / "large.safetensors")
    assert max(sizes) <= pager.storage.nbytes() // 8 and len(sizes) > 3 * 16
    loaded = safetensors.load_file(tmp_path / "large.safetensors")
    plain = loaded["large"]
    assert torch.equal(loaded["transposed"], plain.t()) and torch.equal(
        loaded["block"], plain[:, 3:900]
    )


def test_shards_are_those_of_an_index_and_load_one_by_one(pager, make_net, tmp_path):
    plain = make_net()
    model = pager.page_(make_net(), min_bytes=0)
    pagert.save(model, tmp_path, max_shard_bytes="16KiB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2 and files == {path.name for path in tmp_path.glob("*.safetensors")}
    loaded = {}
    for file in files:
        shard = safetensors.load_file(tmp_path / file)
        assert {index["weight_map"][name] for name in shard} == {file}
        loaded |= shard
        sizes = [tensor.numel() * tensor.itemsize for tensor in shard.values()]
        assert sum(sizes) <= 16 << 10 or len(sizes) == 1
    for name, tensor in loaded.items():
        assert_same_bits(tensor, plain.state_dict()[name], name)


def test_what_was_there_in_another_number_of_files_is_gone(make_net, tmp_path):
    for limit in (None, "16KiB", "40KiB", "40KiB", None, "16KiB"):
        model = make_net(1 if limit is None else 2)
        pagert.save(model, tmp_path, max_shard_bytes=limit)
        index = tmp_path / "model.safetensors.index.json"
        files = {path.name for path in tmp_path.iterdir()}
        if limit is None:
            assert files == {"model.safetensors"}
        else:
            listed = json.loads(index.read_text())["weight_map"].values()
            assert files == {index.name, *listed}


KILLS = ("pwrite", "fsync", "rename", "unlink")


def save_and_die(model, path, limit, deadly_call):
    """In a child: save, and be killed at one of the system's calls. Say whether it came that far."""
    child = os.fork()
    if child == 0:
        calls = []

        def dying(real):
            def call(*arguments, **options):
                calls.append(real)
                if len(calls) == deadly_call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        for name in KILLS:
            setattr(os, name, dying(getattr(os, name)))
        with contextlib.suppress(BaseException):
            pagert.save(model, path, max_shard_bytes=limit)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("before", [None, "40KiB"])
@pytest.mark.parametrize("limit", [None, "40KiB"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_file_whole(limit, before, tmp_path):
    """D7."""
    old, new = (torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(3)]) for _ in range(2))
    found = set()
    killed, deadly_call = True, 0
    while killed:
        deadly_call += 1
        pagert.save(old, tmp_path, max_shard_bytes=before)
        killed = save_and_die(new, tmp_path, limit, deadly_call)
        model = torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(3)])
        pagert.files.load_into(model, tmp_path)
        same = [
            all(
                torch.equal(a, b)
                for a, b in zip(model.state_dict().values(), other.state_dict().values())
            )
            for other in (old, new)
        ]
        assert sum(same) == 1
        found.add((killed, same[0]))
        if not killed:
            pagert.save(old, tmp_path)
            # What the killed ones left is removed by those that follow.
            assert not list(tmp_path.glob(".*.partial"))
    assert found >= {(True, True), (False, False)} and deadly_call > 8


@pytest.mark.parametrize("failing_call", [1, 3, 7])
def test_a_full_disk_leaves_the_old_file_and_says_what_is_free(
    failing_call, pager, make_net, tmp_path, monkeypatch
):
    """D7."""
    pagert.save(make_net(1), tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    model, real, calls = pager.page_(make_net(2), min_bytes=0), os.pwrite, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"\d+ bytes are free for the \d+ .*unchanged") as caught:
        pagert.save(model, tmp_path / "m.safetensors")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "m.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
    assert (tmp_path / "m.safetensors").read_bytes() == before


@pytest.mark.parametrize("failing_call", range(1, 7))
def test_a_sharded_save_that_fails_leaves_the_old_shards_and_no_others(
    failing_call, make_net, tmp_path, monkeypatch
):
    old = torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(3)])
    pagert.save(old, tmp_path, max_shard_bytes="16KiB")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, calls = pathlib.Path.rename, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == failing_call:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(pathlib.Path, "rename", failing)
    new = torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(4)])
    with contextlib.suppress(KeyboardInterrupt):
        pagert.save(new, tmp_path, max_shard_bytes="16KiB")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert (after == before) == (failing_call <= 5)  # four shards and the index


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_keeps_the_old_file(small_disk, pager, make_net, monkeypatch):
    """D7, on a file system of its own; first what is known before anything is written."""
    pagert.save(make_net(1), small_disk / "m.safetensors")
    before = (small_disk / "m.safetensors").read_bytes()
    (small_disk / "other").write_bytes(bytes(400 << 10))
    model = pager.page_(make_net(2), min_bytes=0)
    for known_before in (True, False):
        with pytest.raises(OSError, match="are free") as caught:
            pagert.save(model, small_disk / "m.safetensors")
        assert caught.value.errno == errno.ENOSPC
        assert ("saving takes" in str(caught.value)) == known_before
        assert sorted(path.name for path in small_disk.iterdir()) == ["m.safetensors", "other"]
        assert (small_disk / "m.safetensors").read_bytes() == before
        monkeypatch.setattr(
            importlib.import_module("pagert.files.save"), "check_room", lambda *arguments: None
        )


def test_permissions_and_a_link_stay(make_net, tmp_path):
    pagert.save(make_net(1), tmp_path / "real.safetensors")
    (tmp_path / "new").touch()
    assert (tmp_path / "real.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode
    (tmp_path / "real.safetensors").chmod(0o640)
    (tmp_path / "link").symlink_to("real.safetensors")
    pagert.save(make_net(2), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real.safetensors").stat().st_mode & 0o777 == 0o640
    assert "layers.0.weight" in safetensors.load_file(tmp_path / "real.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.ones(2).to_sparse()}, "a: .*sparse"),
        ({"a": torch.ones(2, device="meta")}, "a: .*meta"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "a .*no such dtype"),
        ({"a": 3}, "'a' is a int"),
        ({3: torch.ones(2)}, "3 is a Tensor"),
        ([torch.ones(2)], "of a list"),
    ],
)
def test_what_the_format_does_not_hold_is_refused_by_name(tensors, message, tmp_path):
    with pytest.raises(UnsupportedTensor, match=message):
        pagert.save(tensors, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_bad_settings_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="max_shard_bytes=0"):
        pagert.save({}, tmp_path / "m.safetensors", max_shard_bytes=0)
    with pytest.raises(ConfigurationError, match=r"metadata\['step'\] is 3"):
        pagert.save({}, tmp_path / "m.safetensors", metadata={"step": 3})
    with pytest.raises(FileNotFoundError, match="create it"):
        pagert.save({}, tmp_path / "nowhere" / "m.safetensors")


@pytest.mark.parametrize("limit", [None, "60KiB"])
def test_a_folder_of_transformers_is_loaded_by_from_pretrained(limit, pager, tmp_path):
    """D3: `save_pretrained` looks for shared storages and refuses paged tensors by name; this does not."""
    transformers = pytest.importorskip("transformers", reason="the extra 'demo' is not installed")
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    with pager.creating():
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedOperator, match=r"pagert\.save"):
        model.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    pagert.save(model, tmp_path, max_shard_bytes=limit)
    assert (tmp_path / "model.safetensors").exists() == (limit is None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    pager.unpage_(model)
    for name, tensor in model.state_dict().items():
        assert_same_bits(loaded.state_dict()[name], tensor, name)
