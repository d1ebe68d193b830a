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
    memory.write()
    again = Memory(next(saved.directory().iterdir()))
    assert again.entries.keys() == memory.entries.keys() != set()
    first, second = AutoLength([Source()], again), AutoLength([Source()], memory)
    assert first.choose(100) == second.choose(100) > 0
    assert saved.memory({**KEY, "mlx": "2"}).entries == {}


def test_files_of_another_layout_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = saved.memory(KEY)
    memory.entries["plain"] = [1.0]
    memory.write()
    saved._memories.clear()
    monkeypatch.setattr(saved, "FORMAT", saved.FORMAT + 1)
    assert saved.memory(KEY).entries == {}


def test_a_process_writes_once_a_second_and_when_it_ends() -> None:
    memory = saved.memory(KEY)
    memory.entries["one"] = [1]
    memory.save()
    memory.entries["two"] = [2]
    memory.save()
    [file] = saved.directory().iterdir()
    assert Memory(file).entries == {"one": [1]}
    saved._write_all()
    assert Memory(file).entries == {"one": [1], "two": [2]}


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\x80"])
def test_a_file_that_cannot_be_read_is_ignored_and_replaced(content: bytes) -> None:
    saved.directory().mkdir(parents=True)
    path().write_bytes(content)
    assert Memory(path()).entries == {}
    learned(path()).write()
    assert Memory(path()).entries != {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_harms_nobody() -> None:
    saved.directory().mkdir(parents=True)
    saved.directory().chmod(0o500)
    learned(path()).write()
    assert Memory(path()).entries == {}


def test_without_a_file_nothing_is_written() -> None:
    learned().write()
    assert not saved.directory().exists()
