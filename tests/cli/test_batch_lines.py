"""The lines of a file of prompts: what is taken, what is named, and what a line asks for."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.cli.batch import parse_line
from mlx_specdec.cli.batch_files import Line, PromptLines
from mlx_specdec.errors import PromptError
from mlx_specdec.options import Options


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


OPTIONS = Options(max_tokens=9, seed=1, rule="token", stop="x")


def parse(entry: Any) -> Any:
    text = entry if isinstance(entry, str) else json.dumps(entry)
    return parse_line(Line(3, text), OPTIONS, as_json=True)


def test_a_line_of_text_is_the_prompt() -> None:
    line = parse_line(Line(2, ' {"a\\nb" '), OPTIONS, as_json=False)
    assert (line.prompt, line.options, line.error) == (' {"a\nb" ', OPTIONS, None)
    assert line.record(text="t") == {"line": 2, "text": "t"}


@pytest.mark.parametrize("name", ["a", 7, 0])
def test_a_line_has_a_name_of_its_own_that_errors_keep(name: str | int) -> None:
    assert parse({"id": name, "prompt": "p"}).record(x=1) == {"line": 3, "id": name, "x": 1}
    line = parse({"id": name, "prompt": "p", "seed": "one"})
    assert line.id == name and "seed must be a whole number" in line.error


def test_messages_are_taken_as_they_are() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    assert parse({"messages": messages}).prompt == messages


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("{", "the line is not JSON"),
        ("[" * 100_000, "not JSON (nested too deeply"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "a number with too many digits"),
        ("[1]", "must be an object"),
        ({}, 'either "prompt" or "messages"'),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 'either "prompt" or'),
        ({"prompt": 5}, '"prompt" must be a string, not 5'),
        ({"prompt": ["a"]}, '"prompt" must be a string'),
        ({"prompt": " \n"}, "the prompt is empty"),
        ('{"prompt": "\\ud800"}', '"prompt" has half a character'),
        ('{"prompt": "a", "id": "\\udfff"}', '"id" has half a character'),
        ({"prompt": "a", "id": [1]}, '"id" must be a string'),
        ({"prompt": "a", "id": True}, '"id" must be a string'),
        ({"messages": []}, '"messages" must be a list'),
        ({"messages": "a"}, '"messages" must be a list'),
        ({"messages": ["a"]}, '"messages" must be a list'),
        ({"messages": [{"role": "user"}]}, '"messages" must be a list'),
        (
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            '"content" must be a string',
        ),
        ({"prompt": "a", "max_tokens": -1}, "max-tokens must be 0 or more, not -1"),
        ({"prompt": "a", "max_tokens": 2.5}, "max-tokens must be a whole number, not 2.5"),
        ({"prompt": "a", "max_tokens": True}, '"max_tokens" cannot be true'),
        ({"prompt": "a", "seed": "x"}, "seed must be a whole number"),
        ({"prompt": "a", "temperature": -1}, "temperature must be 0 or lie between"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be 0 or lie between"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "a", "top_p": 0}, "top-p must lie in [1e-30, 1]"),
        ({"prompt": "a", "stop": 5}, '"stop" must be a string, not 5'),
        ({"prompt": "a", "stop": {"x": 1}}, '"stop" must be a string'),
        ({"prompt": "a", "stop": [""]}, "a stop string must not be empty"),
        ({"prompt": "a", "rule": "block"}, '"rule" is one for all lines'),
        ({"prompt": "a", "num_draft": 3}, '"num_draft" is one for all lines'),
    ],
)
def test_a_line_of_which_nothing_can_be_made_says_why(entry: Any, part: str) -> None:
    error = parse(entry).error
    assert error is not None and part in error and "\n" not in error, error
