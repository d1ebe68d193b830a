"""The lines of a file of prompts: what is taken, what is named, and how little is held."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mlx_specdec.cli.batch_files import PromptLines
from mlx_specdec.errors import PromptError


def read(file: Path) -> list[tuple[int, str]]:
    return [(line.number, line.text) for line in PromptLines(file).prompts]


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
    assert PromptLines(file).count == count
    assert PromptLines(file).sha256 == hashlib.sha256(content).hexdigest()


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
    assert PromptLines(tmp_path / name).as_json is as_json


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
