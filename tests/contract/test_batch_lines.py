"""The prompts of `batch`: which lines are taken, and what is said about the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from .support import Outcome, checkpoint, command

GOOD = {"prompt": "les pates"}
WRONG: list[tuple[Any, str]] = [
    *json.loads(Path(__file__).with_name("wrong_lines.json").read_text()),
    ("[" * 100_000, "not JSON (nested too deeply"),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "a number with too many digits"),
]
"""A line -> a part of its error."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"))


def batch(model: Path, file: Path, content: bytes, *flags: object) -> Outcome:
    file.write_bytes(content)
    output = file.with_name("out.jsonl")
    return command(
        "batch", file, "-o", output, "--model", model, "-m", 2, "--no-cost-cache", *flags
    )


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.with_name("out.jsonl").read_bytes().splitlines()]


def lines(rows: list[Any]) -> bytes:
    return "".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows).encode()


def test_wrong_lines_become_errors_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    done = batch(model, file, lines([GOOD, *(line for line, _ in WRONG), GOOD]))
    assert done.code == 1
    assert f'{len(WRONG)} of {len(WRONG) + 2} lines gave no text: see "error" in' in done.err
    first, *wrong, last = records(file)
    assert first["text"] == last["text"] and (first["line"], last["line"]) == (1, len(WRONG) + 2)
    for number, ((line, part), record) in enumerate(zip(WRONG, wrong, strict=True), start=2):
        assert part in record["error"] and "\n" not in record["error"], line
        names = {"line", "error", *(("id",) if record.get("id") in ("named", 0) else ())}
        assert record["line"] == number and record.keys() == names
    assert [record["id"] for record in wrong if "id" in record] == ["named", 0]


@pytest.mark.parametrize("number", [1, 17], ids=["not JSON", "no template"])
def test_strict_stops_at_the_first_wrong_line(model: Path, tmp_path: Path, number: int) -> None:
    file = tmp_path / "in.jsonl"
    line, part = WRONG[number]
    rows = lines([GOOD, line, GOOD])
    done = batch(model, file, rows, "--strict", "--quiet")
    done.refuses(f"line 2 of {file}: ", part)
    assert not file.with_name("out.jsonl").exists()
    # The same run goes on without --strict, and then there is nothing to go on from.
    assert batch(model, file, rows).code == 1 and len(records(file)) == 3


@pytest.mark.parametrize(
    ("name", "content", "numbers", "as_json"),
    [
        ("a.txt", b"a\nb\n", [1, 2], False),
        ("a.txt", b"a\nb", [1, 2], False),
        ("a.txt", b"a\r\n b \r\n", [1, 2], False),
        ("a.txt", b"\xef\xbb\xbfa\nb", [1, 2], False),
        ("a.txt", b"\n  \na\n\n", [3], False),
        ("a.txt", "é\u2028\x0cö\nü".encode(), [1, 2], False),
        ("a.txt", b'{"prompt": "a"}\nb\n', [1, 2], True),
        ("a.txt", b'\n\n  {"prompt": "a"}\n', [3], True),
        ("a.txt", b"{ is a brace\n", [1], False),
        ("a.txt", b'["a"]\n', [1], False),
        ("a.txt", b'a\n{"prompt": "a"}\n', [1, 2], False),
        ("a.jsonl", b"not yet\n", [1], True),
        ("a.NDJSON", b"[\n", [1], True),
    ],
)
def test_lines_keep_their_numbers_and_are_json_by_name_or_by_the_first_one(
    model: Path, tmp_path: Path, name: str, content: bytes, numbers: list[int], as_json: bool
) -> None:
    batch(model, tmp_path / name, content)
    found = records(tmp_path / name)
    assert [record["line"] for record in found] == numbers
    is_json = content.lstrip().startswith(b'{"prompt": "a"}')
    for record in found:
        assert ("error" in record) == (as_json and not (is_json and record is found[0]))


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
    file = tmp_path / "in.txt"
    batch(Path("/nowhere"), file, content).refuses(str(file), *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]
