# SPDX-License-Identifier: Apache-2.0
"""The text of a job: read, turned into tokens, cut into windows for training and held out."""

from __future__ import annotations

import contextlib
import sqlite3
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagert.finetune.errors import BadText, TextTooShort
from pagert.finetune.packaged import PACKAGED_TEXTS, resolve

__all__ = ["Tokens", "Windows", "read_lines", "tokenise"]

# Tokenizers hold strings and offsets for each token of a piece: pieces bound that.
_PIECE_CHARACTERS = 32 * 1024
_HELD_OUT_SHARE = 0.05


def read_lines(text: str, limit_bytes: int) -> Iterator[str]:
    """Yield the lines of a text, up to `limit_bytes` of it.

    Parameters
    ----------
    text
        Path of a UTF-8 file or of an SQLite file with Bible verses (table `Bible`, columns
        `Passage1` and `Passage2`), or the name of a packaged text.

    Raises
    ------
    BadText
        Where there is no such file, or it is neither.
    """
    path = resolve(text, PACKAGED_TEXTS)
    if not path.is_file():
        raise BadText(
            f"--text {text}: no such file; give a UTF-8 text file, an SQLite file of Bible verses, "
            f"or one of {', '.join(sorted(PACKAGED_TEXTS))}"
        )
    with path.open("rb") as file:
        is_database = file.read(16) == b"SQLite format 3\0"
    lines = _read_verses(path) if is_database else _read_plain(path)
    read_bytes = 0
    for line in lines:
        read_bytes += len(line.encode())
        if read_bytes > limit_bytes:
            return
        yield line


def _read_plain(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        try:
            # A bounded read: a file without line ends must not come as one line of any length.
            while line := file.readline(_PIECE_CHARACTERS):
                if "\0" in line:
                    raise BadText(
                        f"--text {path}: it has zero bytes, so it is not text; give a UTF-8 text "
                        "file"
                    )
                yield line
        except UnicodeDecodeError as error:
            raise BadText(
                f"--text {path}: not UTF-8 ({error.reason}: byte "
                f"{error.object[error.start]:#04x}); convert it to UTF-8"
            ) from error


def _read_verses(path: Path) -> Iterator[str]:
    query = "SELECT Passage1, Passage2 FROM Bible ORDER BY TestamentID, BookID, ChapterID, VerseID"
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            for passages in database.execute(query):
                yield " ".join(str(passage) for passage in passages if passage) + "\n"
    except sqlite3.DatabaseError as error:
        raise BadText(
            f"--text {path}: an SQLite file, but not of Bible verses ({error}); the table Bible "
            "with the columns "
            "Passage1, Passage2, TestamentID, BookID, ChapterID and VerseID is what can be read; "
            "give other text as UTF-8"
        ) from error


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text: int32 on the CPU, in the order of the text."""

    ids: torch.Tensor
    text: str


def tokenise(tokenizer: Any, text: str, limit_bytes: int, vocabulary_size: int) -> Tokens:
    """Turn a text into tokens, piece by piece.

    Raises
    ------
    BadText
        As `read_lines`; also where the tokenizer makes tokens that the model has no embedding for.
    """
    ids = array("i")
    for piece in _pieces(read_lines(text, limit_bytes)):
        ids.extend(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
    tensor = (
        torch.frombuffer(ids, dtype=torch.int32).clone()
        if ids
        else torch.empty(0, dtype=torch.int32)
    )
    if len(ids) and int(tensor.max()) >= vocabulary_size:
        raise BadText(
            f"--text {text}: the tokenizer makes token {int(tensor.max())}, the model knows "
            f"{vocabulary_size} tokens; "
            "model and tokenizer do not belong together"
        )
    return Tokens(tensor, text)


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    piece: list[str] = []
    characters = 0
    for line in lines:
        piece.append(line)
        characters += len(line)
        if characters >= _PIECE_CHARACTERS:
            yield "".join(piece)
            piece, characters = [], 0
    if piece:
        yield "".join(piece)


class Windows:
    """Windows of a text: `seq` tokens, and for each the token that follows it.

    The end of the text is held out. The same tokens, shape and seed give the same batches, in any
    process.

    Parameters
    ----------
    tokens
        The whole text.
    batch, seq
        Shape of a batch.
    seed
        Of the places in the text that batches are taken from.

    Raises
    ------
    TextTooShort
        Where there is not one window to train on and one to hold out.
    """

    def __init__(self, tokens: Tokens, *, batch: int, seq: int, seed: int) -> None:
        count = tokens.ids.numel()
        needed = 2 * (seq + 1)
        if count < needed:
            raise TextTooShort(
                f"--text {tokens.text}: {count} tokens; --seq {seq} needs {needed}, one window "
                "to train on and one to "
                "hold out; give a longer text or a smaller --seq"
            )
        self._tokens = tokens.ids
        self._batch, self._length = batch, seq + 1
        self._split = count - max(self._length, int(count * _HELD_OUT_SHARE))
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def train_tokens(self) -> int:
        """Tokens that batches are taken from."""
        return self._split

    @property
    def held_out_tokens(self) -> int:
        """Tokens at the end of the text that no batch has."""
        return self._tokens.numel() - self._split

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the next batch: inputs and targets, int64 of shape (batch, seq)."""
        starts = torch.randint(
            0, self._split - self._length + 1, (self._batch,), generator=self._generator
        )
        return self._at(starts.tolist())

    def held_out(self, batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield up to `batches` batches of windows, evenly spread over the held-out part."""
        last = self._tokens.numel() - self._length
        count = max(1, min(batches * self._batch, self.held_out_tokens // self._length))
        stride = (last - self._split) / max(1, count - 1)
        starts = [self._split + round(index * stride) for index in range(count)]
        for first in range(0, count, self._batch):
            yield self._at(starts[first : first + self._batch])

    def _at(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        windows = torch.stack(
            [self._tokens[start : start + self._length] for start in starts]
        ).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
