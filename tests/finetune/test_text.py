# SPDX-License-Identifier: Apache-2.0
"""Texts, tokens and windows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from pagert.finetune.errors import BadText, TextTooShort
from pagert.finetune.text import Tokens, Windows, read_lines, tokenise

LIMIT = 2**20


def make_database(path: Path, table: str, rows: list[tuple]) -> Path:
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            f"CREATE TABLE {table} (TestamentID INT, BookID INT, ChapterID INT, VerseID INT, "
            "Passage1 TEXT, Passage2 TEXT)"
        )
        database.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?)", rows)
        database.commit()
    return path


def test_verses_come_in_the_order_of_the_book(tmp_path) -> None:
    rows = [
        (2, 1, 1, 1, "1:1 The book.", ""),
        (1, 1, 2, 1, "2:1 Thus.", None),
        (1, 1, 1, 2, "1:2 And the earth.", "And darkness."),
        (1, 1, 1, 1, "1:1 In the beginning.", ""),
    ]
    path = make_database(tmp_path / "verses.db", "Bible", rows)
    assert list(read_lines(str(path), LIMIT)) == [
        "1:1 In the beginning.\n",
        "1:2 And the earth. And darkness.\n",
        "2:1 Thus.\n",
        "1:1 The book.\n",
    ]


def test_reading_verses_leaves_the_folder_as_it_was(tmp_path) -> None:
    path = make_database(tmp_path / "verses.db", "Bible", [(1, 1, 1, 1, "1:1 In", "")])
    before = path.read_bytes()
    list(read_lines(str(path), LIMIT))
    assert [file.name for file in tmp_path.iterdir()] == ["verses.db"]
    assert path.read_bytes() == before


def test_another_database_is_refused(tmp_path) -> None:
    path = make_database(tmp_path / "other.db", "Quran", [])
    with pytest.raises(BadText, match=r"not of Bible verses.*no such table: Bible"):
        list(read_lines(str(path), LIMIT))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"caf\xe9\n", "not UTF-8"), (b"a\0b", "zero bytes")],
)
def test_what_is_no_text_is_refused(content, message, tmp_path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadText, match=message):
        list(read_lines(str(path), LIMIT))


def test_text_is_read_byte_for_byte(tmp_path) -> None:
    content = "één\r\ntwo\n\n" + "long " * 20000 + "\nno end"
    (tmp_path / "text").write_bytes(content.encode())
    assert "".join(read_lines(str(tmp_path / "text"), LIMIT)) == content


def test_no_more_of_a_text_is_read_than_allowed(tmp_path) -> None:
    (tmp_path / "text").write_text("0123456789\n" * 1000)
    assert sum(map(len, read_lines(str(tmp_path / "text"), 500))) == 495


class CountingTokenizer:
    """One token for each character: its code."""

    def __call__(self, text: str, **options) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_tokens_of_the_pieces_are_those_of_the_text(tmp_path) -> None:
    content = "".join(f"line {number}\n" for number in range(20000))
    (tmp_path / "text").write_text(content)
    tokens = tokenise(CountingTokenizer(), str(tmp_path / "text"), LIMIT, 256)
    assert bytes(tokens.ids.to(torch.uint8).tolist()).decode() == content


def test_token_beyond_the_vocabulary_is_refused(tmp_path) -> None:
    (tmp_path / "text").write_text("abz")
    with pytest.raises(BadText, match="makes token 122, the model knows 122 tokens"):
        tokenise(CountingTokenizer(), str(tmp_path / "text"), LIMIT, 122)


def windows_of(count: int, *, batch: int = 2, seq: int = 8, seed: int = 0) -> Windows:
    tokens = Tokens(torch.arange(count, dtype=torch.int32), "text")
    return Windows(tokens, batch=batch, seq=seq, seed=seed)


def test_targets_are_the_tokens_that_follow() -> None:
    inputs, targets = windows_of(500).next_batch()
    assert inputs.shape == targets.shape == (2, 8)
    assert torch.equal(targets, inputs + 1)


def test_no_batch_reaches_into_what_is_held_out() -> None:
    windows = windows_of(200)
    held_out = torch.cat([torch.cat(pair).flatten() for pair in windows.held_out(100)])
    for _ in range(200):
        inputs, targets = windows.next_batch()
        assert torch.cat([inputs, targets]).max() < held_out.min()


def test_held_out_windows_do_not_overlap_and_respect_the_number_asked_for() -> None:
    windows = windows_of(4000)
    batches = list(windows.held_out(3))
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert len(batches) == 3 and starts.numel() == 6
    assert (starts.diff() >= 9).all()
    assert starts.min() >= windows.train_tokens and starts.max() + 9 <= 4000


def test_same_seed_same_batches_and_another_seed_others() -> None:
    def first(seed: int) -> torch.Tensor:
        windows = windows_of(5000, seed=seed)
        return torch.cat([windows.next_batch()[0] for _ in range(5)])

    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))


def test_shortest_text_is_one_window_each_and_one_token_less_is_refused() -> None:
    windows = windows_of(18)
    assert (windows.train_tokens, windows.held_out_tokens) == (9, 9)
    assert len(list(windows.held_out(8))) == 1
    with pytest.raises(TextTooShort, match="17 tokens; --seq 8 needs 18"):
        windows_of(17)
