"""What rounds have taught, as it is saved: for whom it counts, and what damaged files do."""

import os
from pathlib import Path

import pytest

from mlx_specdec.draft_length import saved
from mlx_specdec.draft_length.auto import AutoLength, Source
from mlx_specdec.draft_length.saved import Memory

from ..support.lengths import run, teach

KEY = {"device": "cpu", "mlx": "1", "target": "t5", "target_bytes": 5}


def path() -> Path:
    return saved.directory() / "pair.json"


def learned(file: Path | None = None) -> Memory:
    memory = Memory(file)
    run(AutoLength([Source()], memory), 60, lambda n: 1 + 0.2 * n, lambda number: number % 4)
    return memory


def test_what_was_learned_is_read_again_and_only_for_its_key() -> None:
    memory = saved.memory(KEY)
    teach(memory, Source(), lambda n: 1 + 0.1 * n)
    memory.save()
    again = Memory(next(saved.directory().iterdir()))
    assert again.entries.keys() == memory.entries.keys() != set()
    first, second = AutoLength([Source()], again), AutoLength([Source()], memory)
    assert first.choose(100) == second.choose(100) > 0
    assert saved.memory({**KEY, "mlx": "2"}).entries == {}


def test_files_of_another_layout_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = saved.memory(KEY)
    memory.entries["plain"] = [1.0]
    memory.save()
    saved._memory.cache_clear()
    monkeypatch.setattr(saved, "FORMAT", saved.FORMAT + 1)
    assert saved.memory(KEY).entries == {}


def test_a_file_is_written_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(saved.time, "monotonic", lambda: now)
    memory = saved.memory(KEY)
    for seconds, read in ((0.0, ["one"]), (9.0, ["one"]), (11.0, ["one", "two", "three"])):
        now = 100.0 + seconds
        memory.entries[["one", "two", "three"][len(memory.entries)]] = [1]
        memory.save()
        [file] = saved.directory().iterdir()
        assert list(Memory(file).entries) == read


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"null", b"\x80"])
def test_a_file_that_cannot_be_read_is_ignored_and_replaced(content: bytes) -> None:
    saved.directory().mkdir(parents=True)
    path().write_bytes(content)
    assert Memory(path()).entries == {}
    learned(path()).save()
    assert Memory(path()).entries != {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_harms_nobody() -> None:
    saved.directory().mkdir(parents=True)
    saved.directory().chmod(0o500)
    learned(path()).save()
    assert Memory(path()).entries == {}


def test_without_a_file_nothing_is_written() -> None:
    learned().save()
    assert not saved.directory().exists()
