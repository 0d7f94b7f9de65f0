# SPDX-License-Identifier: Apache-2.0
"""pager.load_ does what load_state_dict does with what the files hold, or refuses by name."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import pagert
from pagert.errors import CheckpointError, CheckpointMismatch, UnsupportedTensor
from pagert.tensor import PagedTensor, copying

safetensors = pytest.importorskip("safetensors.torch", reason="the extra 'demo' is not installed")


def state(module):
    """Plain copies, after every paged byte has left the device."""
    found = {}
    for name, tensor in module.state_dict().items():
        if type(tensor) is PagedTensor:
            tensor.evict()
        found[name] = plain(tensor)
    return found


def plain(tensor):
    return (
        copying.load(PagedTensor, tensor.detach())
        if type(tensor) is PagedTensor
        else tensor.clone()
    )


def assert_same(module, expected):
    found = state(module)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture
def folder(tmp_path, make_net):
    """The library's own files of a model: one file, and the same in shards."""
    tensors = {name: t.contiguous() for name, t in make_net(7).state_dict().items()}
    del tensors["head.weight"]
    (tmp_path / "one").mkdir()
    safetensors.save_file(tensors, tmp_path / "one/model.safetensors")
    (tmp_path / "two").mkdir()
    names = sorted(tensors)
    shards = {"b.safetensors": names[::2], "a.safetensors": names[1::2]}
    for file, inside in shards.items():
        safetensors.save_file({name: tensors[name] for name in inside}, tmp_path / "two" / file)
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (tmp_path / "two/model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


PATHS = {
    "file": lambda folder: folder / "one/model.safetensors",
    "folder": lambda folder: str(folder / "one"),
    "folder with index": lambda folder: folder / "two",
    "index": lambda folder: folder / "two/model.safetensors.index.json",
    "its file's name": lambda folder: folder / "two/model.safetensors",
    "files": lambda folder: [folder / "two/a.safetensors", folder / "two/b.safetensors"],
}


@pytest.mark.parametrize("kind", PATHS)
def test_every_form_of_a_checkpoint_is_loaded_bit_for_bit(kind, pager, make_net, folder):
    model = pager.page_(make_net())  # small tensors stay plain
    result = pager.load_(model, PATHS[kind](folder))
    assert result.missing_keys == [] and result.unexpected_keys == []
    assert_same(model, state(make_net(7)))
    assert model.head.weight is model.embedding.weight


def test_load_streams_into_tensors_larger_than_the_device(make_pager, make_net, folder):
    pager = make_pager(device_bytes=32 << 10)
    model = pager.page_(make_net(), min_bytes=0)
    strides = [parameter.stride() for parameter in model.parameters()]
    pager.load_(model, folder / "one")
    assert [parameter.stride() for parameter in model.parameters()] == strides
    pager.unpage_(model)
    assert_same(model, state(make_net(7)))


def test_dtypes_are_converted_as_load_state_dict_does(pager, make_net, tmp_path):
    stored = {
        name: t.double() if t.is_floating_point() else t.short()
        for name, t in make_net(7).state_dict().items()
    }
    pagert.save(stored, tmp_path / "m.safetensors")
    model, expected = pager.page_(make_net(), min_bytes=0), make_net()
    pager.load_(model, tmp_path / "m.safetensors")
    expected.load_state_dict(stored)
    assert_same(model, state(expected))


def test_a_saved_tie_is_restored_in_a_model_without_it(pager, make_net, tmp_path):
    pagert.save(make_net(7), tmp_path / "m.safetensors")
    model = make_net()
    model.head.weight = nn.Parameter(torch.zeros(400, 24))
    pager.page_(model, min_bytes=0)
    pager.load_(model, tmp_path / "m.safetensors")
    assert_same(model, state(make_net(7)))


def test_names_that_differ_are_returned_where_not_strict(pager, make_net, folder):
    model, plain_model = make_net(), make_net()
    for one in (model, plain_model):
        one.extra = nn.Linear(3, 3)
        nn.init.zeros_(one.extra.weight)
        nn.init.ones_(one.extra.bias)
        del one.layers[1]
    pager.page_(model, min_bytes=0)
    result = pager.load_(model, folder / "one", strict=False)
    stored = safetensors.load_file(folder / "one/model.safetensors")
    stored["head.weight"] = stored["embedding.weight"]
    expected = plain_model.load_state_dict(stored, strict=False)
    assert set(result.missing_keys) == set(expected.missing_keys) != set()
    assert set(result.unexpected_keys) == set(expected.unexpected_keys) != set()
    assert_same(model, state(plain_model))


def rename(module, state_dict, prefix, *rest):
    for name in list(state_dict):
        if name.startswith(prefix + "old_"):
            state_dict[name.replace("old_", "")] = state_dict.pop(name) * 2


def test_hooks_of_loading_see_tensors(pager, tmp_path):
    pagert.save(
        {"old_weight": torch.ones(40, 40), "bias": torch.ones(40)}, tmp_path / "m.safetensors"
    )
    model = pager.page_(nn.Linear(40, 40), min_bytes=0)
    model.register_load_state_dict_pre_hook(rename)
    pager.load_(model, tmp_path / "m.safetensors")
    assert torch.equal(plain(model.weight), torch.full((40, 40), 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.weight"), r"layers\.1\.weight is missing in the checkpoint"),
        (lambda t: t.update(more=torch.ones(2)), "more is not in the model"),
        (
            lambda t: t.update({"layers.1.weight": torch.ones(24, 25)}),
            r"layers\.1\.weight is \(24, 25\) in the checkpoint and \(24, 24\) in the model",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
@pytest.mark.parametrize("paged", [True, False])
def test_what_does_not_fit_is_named_before_anything_is_changed(
    change, message, paged, pager, make_net, folder
):
    tensors = safetensors.load_file(folder / "one/model.safetensors")
    change(tensors)
    safetensors.save_file(tensors, folder / "one/model.safetensors")
    model = pager.page_(make_net(), min_bytes=0) if paged else make_net()
    with pytest.raises(CheckpointMismatch, match=message) as caught:
        pager.load_(model, folder / "one")
    assert isinstance(caught.value, RuntimeError)  # what load_state_dict raises
    assert_same(model, state(make_net()))


def lie(path, change):
    """Write a file whose header says something else."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


CORRUPTIONS = {
    "empty": lambda path: path.write_bytes(b""),
    "seven bytes": lambda path: path.write_bytes(bytes(7)),
    "in the header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "by one byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another format": lambda path: path.write_bytes(b"GGUF" + bytes(1000)),
    "no JSON": lambda path: path.write_bytes((8).to_bytes(8, "little") + b"abcdefgh"),
    "a list": lambda path: path.write_bytes((8).to_bytes(8, "little") + b"[1,2,3] "),
    "no offsets": lambda path: lie(path, lambda header: header["counts"].pop("data_offsets")),
    "an unknown dtype": lambda path: lie(path, lambda header: header["counts"].update(dtype="Q9")),
    "a negative size": lambda path: lie(path, lambda header: header["counts"].update(shape=[-1])),
    "another shape": lambda path: lie(path, lambda header: header["counts"].update(shape=[3])),
    "text for numbers": lambda path: lie(path, lambda header: header["counts"].update(shape=["a"])),
    "overlapping": lambda path: lie(
        path, lambda header: header["transposed"].update(data_offsets=[0, 9600])
    ),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_truncated_and_corrupt_files_are_refused_before_anything_is_changed(
    kind, pager, make_net, folder
):
    path = folder / "one/model.safetensors"
    CORRUPTIONS[kind](path)
    model = pager.page_(make_net(), min_bytes=0)
    with pytest.raises(CheckpointError, match=str(path)):
        pager.load_(model, path)
    assert_same(model, state(make_net()))


def test_a_file_that_shrinks_while_it_is_read_is_an_error_of_its_own(
    pager, make_net, folder, monkeypatch
):
    path = folder / "one/model.safetensors"
    real = pagert.files.load._check

    def shrinking(*arguments):
        real(*arguments)
        path.write_bytes(path.read_bytes()[:-2000])

    monkeypatch.setattr(pagert.files.load, "_check", shrinking)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        pager.load_(pager.page_(make_net(), min_bytes=0), path)


def test_folders_that_are_no_checkpoint_are_refused(pager, make_net, folder, tmp_path):
    model = make_net()
    with pytest.raises(FileNotFoundError):
        pager.load_(model, tmp_path / "nothing.safetensors")
    (tmp_path / "bare").mkdir()
    with pytest.raises(CheckpointError, match="no safetensors file in this folder"):
        pager.load_(model, tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"lies in .* and in"):
        pager.load_(model, [folder / "one/model.safetensors", folder / "two/a.safetensors"])
    index = folder / "two/model.safetensors.index.json"
    (folder / "two/other.safetensors.index.json").write_text(index.read_text())
    with pytest.raises(CheckpointError, match="2 indices"):
        pager.load_(model, folder / "two")
    listed = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": listed["weight_map"] | {"more": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"1 tensors of the index .* more"):
        pager.load_(model, index)
    (folder / "two/a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing: a\.safetensors"):
        pager.load_(model, index)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="not an index"):
        pager.load_(model, index)


def test_a_meta_model_is_refused_with_the_remedy(pager, make_net, folder):
    with torch.device("meta"):
        model = make_net()
    with pytest.raises(UnsupportedTensor, match=r"meta device.*pager\.creating\(\)"):
        pager.load_(model, folder / "one")
