"""Indexes on disk: found again, never half there, built again when broken, never in the way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_specdec import process as user_cache
from mlx_specdec.proposers import documents as document_cache
from mlx_specdec.proposers.documents import HEADER, DocumentIndex, IndexKey

KEY = IndexKey("d0", "e1", 50)
TEXT = [int(x) for x in np.random.default_rng(3).integers(0, 50, 500)]


def built(key: IndexKey = KEY) -> DocumentIndex:
    return document_cache.build(key, [np.array(TEXT, np.int32)])


def works(index: DocumentIndex | None) -> bool:
    assert index is not None
    return index.following(index.find(TEXT[:90]), 6) == TEXT[90:96]


@pytest.fixture
def file() -> Path:
    """The only file, of an index that was built."""
    built()
    (only,) = user_cache.directory("documents").iterdir()
    return only


def test_an_index_is_found_again_by_the_same_key_alone(file: Path) -> None:
    assert works(document_cache.read(KEY))
    assert document_cache.read(replace(KEY, documents="d1")) is None
    assert document_cache.read(replace(KEY, tokenizer="e2")) is None
    assert document_cache.read(replace(KEY, vocabulary=51)) is None


def test_a_file_under_another_ones_name_is_not_taken_for_it(file: Path) -> None:
    other = replace(KEY, tokenizer="e2")
    file.rename(document_cache._file(other))
    assert document_cache.read(other) is None


def test_eight_bytes_a_token_and_a_header_are_on_disk(file: Path) -> None:
    assert file.stat().st_size == HEADER + 8 * (len(TEXT) + 1)


def test_a_file_is_on_the_disk_before_it_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    built()
    (only,) = user_cache.directory("documents").iterdir()
    assert sizes == [only.stat().st_size]


@pytest.mark.parametrize("place", [0, 40])
def test_a_changed_header_is_noticed(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 5
    file.write_bytes(content)
    assert document_cache.read(KEY) is None
    assert works(built())
    assert works(document_cache.read(KEY))


@pytest.mark.parametrize("size", [0, 3, HEADER, HEADER + 800, HEADER + 8 * 501 + 4, 10_000])
def test_a_file_of_another_size_is_built_again(file: Path, size: int) -> None:
    os.truncate(file, size)
    assert document_cache.read(KEY) is None
    assert works(built())
    assert works(document_cache.read(KEY))


@pytest.mark.parametrize("header", [b"[1]", b'{"count": "x"}', b'{"count": -1}', b"7", b"{"])
def test_a_header_of_something_else_is_as_good_as_none(file: Path, header: bytes) -> None:
    file.write_bytes(header.ljust(HEADER) + file.read_bytes()[HEADER:])
    assert document_cache.read(KEY) is None


def test_what_ends_early_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        built()
    assert list(user_cache.directory("documents").iterdir()) == []


def test_an_index_that_cannot_be_written_stays_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(user_cache.PLACE, str(tmp_path / "file"))
    assert works(built())

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(user_cache.PLACE, str(tmp_path / "full"))
    monkeypatch.setattr(os, "replace", full)
    assert works(built())
    assert list(user_cache.directory("documents").iterdir()) == []


def test_what_was_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [replace(KEY, documents=name) for name in "abc"]
    for age, key in enumerate(keys):
        built(key)
        os.utime(document_cache._file(key), (1000 + age, 1000 + age))
    assert works(document_cache.read(keys[0]))  # and is the newest by that
    whole = sum(file.stat().st_size for file in user_cache.directory("documents").iterdir())
    monkeypatch.setattr(document_cache, "KEPT", whole)
    built()
    there = [document_cache._file(key).exists() for key in (*keys, KEY)]
    assert there == [True, False, True, True]


def test_what_killed_processes_left_makes_room_as_well(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = file.with_name(".a.partial")
    old.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    monkeypatch.setattr(document_cache, "KEPT", 2 * file.stat().st_size - HEADER)
    built(replace(KEY, documents="d1"))
    assert not old.exists() and file.exists()


def test_what_documents_hold_is_hashed_again_only_where_they_have_changed(tmp_path: Path) -> None:
    hashed = []

    def compute(files: Sequence[Path]) -> str:
        hashed.append([file.read_text() for file in files])
        return f"{len(hashed):032x}"

    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    for file in (first, second):
        file.write_text("old")
        os.utime(file, (1000, 1000))
    files = [first, second]
    assert document_cache.digest(files, compute) == document_cache.digest(files, compute)
    assert hashed == [["old", "old"]]
    assert document_cache.digest([second, first], compute) == f"{2:032x}"
    first.write_text("new")  # of the same size, and just now: its time says nothing yet
    assert document_cache.digest(files, compute) != document_cache.digest(files, compute)
    assert len(hashed) == 4
    os.utime(first, (2000, 2000))
    assert document_cache.digest(files, compute) == document_cache.digest(files, compute)
    assert len(hashed) == 5
    for note in user_cache.directory("documents").glob("*.digest"):
        note.write_bytes(b"\xff half")
    document_cache.digest(files, compute)
    assert len(hashed) == 6
    with pytest.raises(FileNotFoundError):
        document_cache.digest([tmp_path / "none"], compute)
