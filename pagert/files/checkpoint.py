# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk: one safetensors file, or several that belong together."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from pagert.errors import CheckpointError
from pagert.files.parts import Staging, part_bytes, parts
from pagert.files.safetensors import StoredTensor, read_header

__all__ = ["INDEX_END", "Checkpoint", "read_index"]

INDEX_END = ".index.json"
_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}\.safetensors$")


class Checkpoint:
    """The tensors of a checkpoint by name. A context manager that holds the files open.

    Parameters
    ----------
    path : path or list of paths
        A safetensors file, several, the index of several, or a folder with one of these.

    Raises
    ------
    CheckpointError
        What is there is no checkpoint, or not a whole one. Every header is checked, no tensor is
        read.
    FileNotFoundError
        Nothing is there.
    """

    def __init__(self, path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[Path, int] = {}
        self._staging = Staging()
        several = not isinstance(path, (str, os.PathLike))
        listed: dict[str, Path] | None = None
        if several:
            files = [Path(one) for one in path]  # type: ignore[union-attr]
        else:
            files, listed = _find(Path(path))  # type: ignore[arg-type]
        for file in files:
            header = read_header(file)
            self.metadata.update(header.metadata)
            for name, stored in header.tensors.items():
                if name in self.tensors and listed is None:
                    raise CheckpointError(
                        f"{name} lies in {self.tensors[name].path} and in {file}; name one file, "
                        "or the files that belong together"
                    )
                if listed is None or listed.get(name) == file:
                    self.tensors[name] = stored
        if listed is not None and (lost := sorted(listed.keys() - self.tensors.keys())):
            raise CheckpointError(
                f"{path}: {len(lost)} tensors of the index are not in their files, such as "
                f"{lost[0]} in {listed[lost[0]]}; fetch or save them again"
            )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def read_into(self, stored: StoredTensor, target: torch.Tensor) -> None:
        """Copy a stored tensor into a tensor of its shape, paged or plain, converting as `copy_`.

        Raises
        ------
        CheckpointError
            The file has become shorter.
        OSError
            It cannot be read.
        """
        item_bytes = stored.dtype.itemsize
        length_max = max(1, part_bytes(target) // max(item_bytes, target.itemsize))
        for part in parts(target, length_max):
            dense, memory = self._staging.like(part.view, stored.dtype)
            run_bytes = part.run_length * item_bytes
            for run, start in enumerate(part.run_starts):
                self._read(
                    stored,
                    memory[run * run_bytes : (run + 1) * run_bytes],
                    stored.offset_bytes + start * item_bytes,
                )
            part.view.copy_(dense)

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """Return a stored tensor as a plain one of its own."""
        plain = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(stored, plain)
        return plain

    def _read(self, stored: StoredTensor, memory: memoryview, offset_bytes: int) -> None:
        if stored.path not in self._files:
            self._files[stored.path] = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
        while len(memory):
            count = os.preadv(self._files[stored.path], [memory], offset_bytes)
            if count == 0:
                raise CheckpointError(
                    f"{stored.path}: the file ends at byte {offset_bytes}, inside {stored.name}; "
                    "it was changed while it was read"
                )
            memory = memory[count:]
            offset_bytes += count


def _find(path: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """Return the files of a checkpoint, and which of them holds what where an index says so."""
    index = path
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors" + INDEX_END))
        if len(indices) > 1:
            raise CheckpointError(
                f"{path}: has {len(indices)} indices ({', '.join(one.name for one in indices)}); "
                "name one of them"
            )
        if not indices:
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{path}: there is no safetensors file in this folder")
            # Beside a whole file, shards without an index are of a save that was killed.
            return [file for file in files if not _SHARD.search(file.name)] or files, None
        index = indices[0]
    elif not path.name.endswith(INDEX_END):
        index = path.with_name(path.name + INDEX_END)
        if path.exists() or not index.is_file():
            return [path], None
    listed = read_index(index)
    files = sorted(set(listed.values()))
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{index}: {len(absent)} files of the index are missing: {', '.join(absent)}; fetch "
            "or save them again"
        )
    return files, listed


def read_index(index: Path) -> dict[str, Path]:
    """Return the file of each tensor that an index lists.

    Raises
    ------
    CheckpointError
        It is no index.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: index.parent / file for name, file in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index}: not an index of safetensors: {error!r}; fetch or save it again"
        ) from error
