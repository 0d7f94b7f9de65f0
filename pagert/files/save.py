# SPDX-License-Identifier: Apache-2.0
"""Models to safetensors files: a part of a tensor at a time, and whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pagert.config import parse_bytes
from pagert.errors import CheckpointError, ConfigurationError, UnsupportedTensor
from pagert.files.checkpoint import INDEX_END, read_index
from pagert.files.parts import Staging, part_bytes, parts
from pagert.files.replace import Replacement, check_room, force_to_disk
from pagert.files.safetensors import DTYPE_NAMES, encode_header
from pagert.files.ties import identity
from pagert.geometry import describe
from pagert.tensor.paged_tensor import check_wrappable

__all__ = ["save"]

_END = ".safetensors"


class _Named(NamedTuple):
    name: str
    tensor: torch.Tensor
    size_bytes: int


def save(
    model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors, paged or plain, to safetensors files that load without pagert.

    At most 4 MiB are held outside of pages, and less than an eighth of the device tier. The file
    is written beside its target and takes its place at the end: a full disk, an exception or a
    kill leaves the previous one whole. Tied tensors are stored once, under their first name; the
    metadata says which other names they have, as `safetensors.torch.save_model` does. Blocks until
    everything is on the disk.

    Parameters
    ----------
    model_or_state_dict : torch.nn.Module or mapping of str to tensor
        A module's parameters and persistent buffers, or tensors by name.
    path : path
        The file. With more than one shard: `x.safetensors` becomes `x-00001-of-00003.safetensors`
        and so on, and `x.safetensors.index.json`. For a folder that exists, `model.safetensors` in
        it.
    max_shard_bytes : int or str, optional
        How much a file holds at most; a larger tensor has one of its own. None: one file.
    metadata : mapping of str to str, optional
        Kept in each file's header.

    Raises
    ------
    UnsupportedTensor
        Before anything is written: a tensor is on the meta device, sparse, quantized, or of a
        dtype that the format does not have; an entry is no tensor.
    ConfigurationError
        `max_shard_bytes` or `metadata` is none.
    OSError
        The files cannot be written; `ENOSPC` before anything is written where that can be known.
        What was there before is unchanged.

    Examples
    --------
    >>> import os, tempfile, torch, pagert
    >>> folder = tempfile.mkdtemp()
    >>> with pagert.Pager(device="cpu", device_bytes="1MiB", host_bytes="4MiB") as pager:
    ...     model = pager.page_(torch.nn.Linear(64, 64))
    ...     pagert.save(model, os.path.join(folder, "model.safetensors"))
    >>> os.listdir(folder)
    ['model.safetensors']
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        target /= f"model{_END}"
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {target.parent} does not exist; create it")
    limit_bytes = None
    if max_shard_bytes is not None:
        limit_bytes = parse_bytes(max_shard_bytes, name="max_shard_bytes")
        if limit_bytes == 0:
            raise ConfigurationError("max_shard_bytes=0: give what a file may hold, or None")
    tensors, noted = _stored_once(_named(model_or_state_dict), _text(metadata or {}))
    check_room(target, sum(entry.size_bytes for entry in tensors))
    shards = _shards(tensors, limit_bytes)
    before = _listed(target)
    if len(shards) == 1:
        _write_all(target, [target], shards, noted)
        index = target.with_name(target.name + INDEX_END)
        index.unlink(missing_ok=True)
        after = {target}
    else:
        files = _shard_names(target, len(shards))
        try:
            _write_all(target, files, shards, noted)
            _write_index(target, files, shards, noted)
        except BaseException:
            for file in set(files) - _listed(target):  # their names were new
                file.unlink(missing_ok=True)
            raise
        target.unlink(missing_ok=True)
        after = set(files)
    # Nothing refers to the previous shards any more.
    for file in before - after:
        file.unlink(missing_ok=True)
    force_to_disk(target.parent)


def _named(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterable[tuple[str, Any]]:
    if isinstance(source, torch.nn.Module):
        return source.state_dict(keep_vars=True).items()
    if isinstance(source, Mapping):
        return source.items()
    raise UnsupportedTensor(
        f"pagert.save of a {type(source).__name__}: give a module, or a mapping of names to tensors"
    )


def _text(metadata: Mapping[str, str]) -> dict[str, str]:
    for name, value in metadata.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise ConfigurationError(
                f"metadata[{name!r}] is {value!r}: the format holds text under text; write it as "
                "JSON"
            )
    return {"format": "pt", **metadata}


def _stored_once(
    named: Iterable[tuple[str, Any]], metadata: dict[str, str]
) -> tuple[list[_Named], dict[str, str]]:
    """Leave out all names of a tensor but its first. The metadata tells of the others."""
    first: dict[object, str] = {}
    stored = []
    for name, tensor in named:
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
            raise UnsupportedTensor(
                f"{name!r} is a {type(tensor).__name__}: safetensors holds tensors under text only; "
                "leave it out, or use torch.save"
            )
        try:
            check_wrappable(tensor)
        except UnsupportedTensor as error:
            raise UnsupportedTensor(f"{name}: {error}") from None
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedTensor(
                f"{name} {describe(tensor)}: safetensors has no such dtype; convert it, or use "
                "torch.save"
            )
        known = first.setdefault(identity(tensor), name)
        if known != name:
            metadata[name] = known
            continue
        stored.append(_Named(name, tensor, tensor.numel() * tensor.itemsize))
    return stored, metadata


def _shards(tensors: Sequence[_Named], limit_bytes: int | None) -> list[list[_Named]]:
    shards: list[list[_Named]] = [[]]
    used_bytes = 0
    for entry in tensors:
        if limit_bytes is not None and shards[-1] and used_bytes + entry.size_bytes > limit_bytes:
            shards.append([])
            used_bytes = 0
        shards[-1].append(entry)
        used_bytes += entry.size_bytes
    return shards


def _shard_names(target: Path, count: int) -> list[Path]:
    """Name the shards. Names of previous ones are not used again: these stay until the index says otherwise."""
    stem = target.name.removesuffix(_END)
    mark = ""
    while True:
        files = [
            target.with_name(f"{stem}{mark}-{number:05}-of-{count:05}{_END}")
            for number in range(1, count + 1)
        ]
        if not any(file.exists() for file in files):
            return files
        mark = f"-{secrets.token_hex(4)}"


def _listed(target: Path) -> set[Path]:
    """Return the shards that lie beside the target and that its index speaks of."""
    try:
        files = set(read_index(target.with_name(target.name + INDEX_END)).values())
    except (OSError, CheckpointError):  # none, or of something else
        return set()
    return {file for file in files if file.parent == target.parent and file.name.endswith(_END)}


def _write_all(
    target: Path,
    files: Sequence[Path],
    shards: Sequence[Sequence[_Named]],
    metadata: Mapping[str, str],
) -> None:
    """Write the files under other names; when all are on the disk, they get their own."""
    staging = Staging()
    with contextlib.ExitStack() as stack:
        written = []
        for file, shard in zip(files, shards, strict=True):
            replacement = stack.enter_context(Replacement(file, target))
            _write(replacement, shard, metadata, staging)
            replacement.force()
            written.append(replacement)
        for replacement in written:
            replacement.commit()
    force_to_disk(target.parent)


@torch.no_grad()
def _write(
    file: Replacement, tensors: Sequence[_Named], metadata: Mapping[str, str], staging: Staging
) -> None:
    # Wide types first, so that each tensor lies aligned to its own width.
    ordered = sorted(tensors, key=lambda entry: -entry.tensor.itemsize)
    header, offsets, _ = encode_header(
        [(entry.name, entry.tensor.dtype, entry.tensor.shape) for entry in ordered], metadata
    )
    file.write(header, 0)
    for (_, tensor, _), offset_bytes in zip(ordered, offsets, strict=True):
        for part in parts(tensor.detach(), max(1, part_bytes(tensor) // tensor.itemsize)):
            dense, memory = staging.like(part.view, tensor.dtype)
            dense.copy_(part.view)
            run_bytes = part.run_length * tensor.itemsize
            for run, start in enumerate(part.run_starts):
                file.write(
                    memory[run * run_bytes : (run + 1) * run_bytes],
                    offset_bytes + start * tensor.itemsize,
                )


def _write_index(
    target: Path,
    files: Sequence[Path],
    shards: Sequence[Sequence[_Named]],
    metadata: Mapping[str, str],
) -> None:
    index = {
        "metadata": {
            **metadata,
            "total_size": sum(entry.size_bytes for shard in shards for entry in shard),
        },
        "weight_map": {
            entry.name: file.name
            for file, shard in zip(files, shards, strict=True)
            for entry in shard
        },
    }
    with Replacement(target.with_name(target.name + INDEX_END), target) as replacement:
        replacement.write(json.dumps(index, indent=2).encode(), 0)
        replacement.force()
        replacement.commit()
    force_to_disk(target.parent)
