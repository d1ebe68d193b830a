"""The lines of a file of prompts: what is taken, what is named, and how little is held."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import pytest

from mlx_specdec.cli import batch_files as lines
from mlx_specdec.cli.batch_files import PromptLines
from mlx_specdec.errors import PromptError


def read(file: Path) -> list[tuple[int, str | None]]:
    with PromptLines(file) as read_lines:
        taken = [(line.number, line.text) for line in read_lines]
        assert len(taken) == read_lines.prompts
        assert [(line.number, line.text) for line in read_lines] == taken
        return taken


@pytest.mark.parametrize(
    ("content", "taken", "count"),
    [
        (b"a\nb\n", [(1, "a"), (2, "b")], 2),
        (b"a\nb", [(1, "a"), (2, "b")], 2),
        (b"a\r\n b \r\n", [(1, "a"), (2, " b ")], 2),
        (b"\xef\xbb\xbfa\nb", [(1, "a"), (2, "b")], 2),
        (b"\n  \na\n\n", [(3, "a")], 4),
        ("é\u2028\x0cö\nü".encode(), [(1, "é\u2028\x0cö"), (2, "ü")], 2),
    ],
)
def test_lines_keep_their_numbers(
    tmp_path: Path, content: bytes, taken: list[tuple[int, str]], count: int
) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(content)
    assert read(file) == taken
    with PromptLines(file) as read_lines:
        assert read_lines.count == count
        assert read_lines.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "as_json"),
    [
        ("a.txt", '{"prompt": "a"}\nb\n', True),
        ("a.txt", '\n\n  {"prompt": "a"}\n', True),
        ("a.txt", "{ is a brace\n", False),
        ("a.txt", '["a"]\n', False),
        ("a.txt", 'a\n{"prompt": "a"}\n', False),
        ("a.jsonl", "not yet\n", True),
        ("a.NDJSON", "[\n", True),
    ],
)
def test_a_file_is_json_by_its_name_or_its_first_object(
    tmp_path: Path, name: str, content: str, as_json: bool
) -> None:
    (tmp_path / name).write_text(content)
    with PromptLines(tmp_path / name) as read_lines:
        assert read_lines.as_json is as_json


@pytest.mark.parametrize("size", [7, 8, 9, 16, 17, 25])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_that_is_too_long_is_passed_over_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, end: str
) -> None:
    monkeypatch.setattr(lines, "LONGEST", 8)
    file = tmp_path / "lines.txt"
    file.write_text("a\n" + "é" * (size // 2) + "x" * (size % 2) + "\nb\n" + "y" * size + end)
    long, last = (None if size > 7 else "ééé" + "x"), (None if size > 7 else "y" * size)
    assert read(file) == [(1, "a"), (2, long), (3, "b"), (4, last)]


def test_lines_of_10_megabytes_take_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(3 * (b"x" * 10_000_000 + b"\n") + b"a\n")
    tracemalloc.start()
    try:
        assert read(file) == [(1, None), (2, None), (3, None), (4, "a")]
        assert tracemalloc.get_traced_memory()[1] < 5 * lines.LONGEST
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ("has no prompts",)),
        (b" \n\r\n\n", ("has no prompts",)),
        (b"\xef\xbb\xbf", ("has no prompts",)),
        (b"a\nb\0c\n", ("is binary", "line 2")),
        (b"a\nb\nd\xe9j\xe0\n", ("not UTF-8 text", "line 3")),
        (b"a\n\xc3", ("not UTF-8 text", "line 2")),
        ("prompt".encode("utf-16"), ("not UTF-8 text", "line 1")),
    ],
)
def test_a_file_that_holds_no_text_is_named(
    tmp_path: Path, content: bytes, parts: tuple[str, ...]
) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(content)
    with pytest.raises(PromptError) as raised:
        PromptLines(file)
    assert all(part in str(raised.value) for part in (str(file), *parts)), raised.value
