"""Results on disk: whole lines, the order of the input, and nobody else's work touched."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.cli import batch_files as module
from mlx_specdec.cli.batch_files import Journal
from mlx_specdec.errors import OutputError

HEADER = {"input": "in.txt", "sha256": "12", "settings": {"seed": 0, "stop": None}}
RECORDS: list[dict[str, Any]] = [
    {"line": 1, "text": "one\r\nand \u2028 a half"},
    {"line": 3, "id": "é", "error": "no"},
    {"line": 4, "text": ""},
    {"line": 6, "text": "six"},
]
SORTED = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
TEXTS = "one\\r\\nand \u2028 a half\n\n\n\n\nsix\n".encode()
LINES = 6


def opened(output: Path, **changed: Any) -> Journal:
    overwrite = changed.pop("overwrite", False)
    return Journal(output, {**HEADER, **changed}, LINES, overwrite=overwrite)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def left(output: Path) -> bytes:
    """What a run left that kept two results."""
    with opened(output) as journal:
        journal.begin()
        journal.append(RECORDS[2])
        journal.append(RECORDS[1])
    return output.with_name("out.partial").read_bytes()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("as_text", "wanted"), [(False, SORTED), (True, TEXTS)])
def test_results_come_out_in_the_order_of_the_lines(
    output: Path, seed: int, as_text: bool, wanted: bytes
) -> None:
    records = random.Random(seed).sample(RECORDS, len(RECORDS))
    with opened(output) as journal:
        assert names(output.parent) == []
        journal.begin()
        for record in records:
            assert record["line"] not in journal
            journal.append(record)
            assert record["line"] in journal
        assert (journal.done, journal.failed) == (4, 1)
        assert list(journal.errors()) == [(3, "no")]
        assert names(output.parent) == ["out.partial"]
        journal.finish(as_text=as_text)
    assert names(output.parent) == ["out"] and output.read_bytes() == wanted


def test_a_run_that_was_cut_off_anywhere_goes_on(output: Path, left: bytes) -> None:
    partial = output.with_name("out.partial")
    header = left.index(b"\n") + 1
    for length in (0, *range(header, len(left) + 1)):
        partial.write_bytes(left[:length])
        with opened(output) as journal:
            assert journal.done == left[:length].count(b"\n") - (length > 0)
            journal.begin()
            for record in reversed(RECORDS):
                if record["line"] not in journal:
                    journal.append(record)
            journal.finish()
        assert output.read_bytes() == SORTED and names(output.parent) == ["out"]
        output.unlink()


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"sha256": "34"}, "over another input (in.txt)"),
        ({"settings": {"seed": 1, "stop": None}}, "with --seed 0, not 1"),
        ({"settings": {"seed": 0, "stop": ["é"]}}, 'with --stop unset, not ["é"]'),
        ({"settings": {"seed": 0, "stop": None, "top_k": 2}}, "with --top-k unset, not 2"),
        ({"settings": {"stop": None}}, "with --seed 0, not unset"),
    ],
)
def test_what_another_run_left_is_named_and_kept(
    output: Path, left: bytes, changed: dict[str, Any], part: str
) -> None:
    with pytest.raises(OutputError) as raised:
        opened(output, **changed)
    assert part in str(raised.value) and "--overwrite" in str(raised.value)
    assert output.with_name("out.partial").read_bytes() == left
    with opened(output, **changed, overwrite=True) as journal:
        assert journal.done == 0
        journal.begin()
        journal.append(RECORDS[0])
    with opened(output, **changed) as journal:
        assert journal.done == 1 and 1 in journal


@pytest.mark.parametrize(
    "content", [b"my notes\n", b"{}\n", b'{"format": "mlx-specdec batch 2"', b"\xff\n", b"[1]\n"]
)
def test_a_file_of_somebody_else_is_never_taken_for_a_journal(output: Path, content: bytes) -> None:
    output.with_name("out.partial").write_bytes(content)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="not left by a run of this program: move it away"):
            opened(output, overwrite=overwrite)
    assert output.with_name("out.partial").read_bytes() == content


def test_places_that_cannot_be_written_are_named(output: Path) -> None:
    with pytest.raises(OutputError, match="none is no directory"):
        opened(output.parent / "none" / "out")
    with pytest.raises(OutputError, match="no regular file"):
        opened(output.parent)
    os.mkfifo(output)
    with pytest.raises(OutputError, match="no regular file"):
        opened(output, overwrite=True)
    output.unlink()
    output.with_name("out.partial").mkdir()
    with pytest.raises(OutputError, match="no regular file"):
        opened(output)


def test_one_process_at_a_time_writes(output: Path, left: bytes) -> None:
    with opened(output), pytest.raises(OutputError, match="another run is writing"):
        opened(output)
    with opened(output) as journal:
        assert journal.done == 2


def test_a_full_disk_costs_the_unfinished_line_alone(
    output: Path, left: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(module.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:5])

    with monkeypatch.context() as full:
        full.setattr(module, "FileIO", Full)
        with opened(output) as journal:
            journal.begin()
            with pytest.raises(OutputError, match=os.strerror(errno.ENOSPC)):
                journal.append(RECORDS[0])
    assert len(output.with_name("out.partial").read_bytes()) == len(left) + 5
    with opened(output) as journal:
        journal.begin()
        assert journal.done == 2
    assert output.with_name("out.partial").read_bytes() == left
