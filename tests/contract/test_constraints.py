"""Constraints on the command line: completions that fit, and runs of batch that differ by them."""

import json
import re
import sys
from pathlib import Path

import pytest

from .interruption import interrupted
from .support import command

SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], '
    '"additionalProperties": false}'
)
OBJECT = r'\{"a": [12]\}'


def file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "asked").write_text(text, encoding="utf-8")
    return tmp_path / "asked"


def test_every_completion_of_a_batch_fits_and_another_schema_is_another_run(
    t5: Path, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    prompts.write_text("les pates\ndeux oeufs\nmidi\n")
    words = ("batch", prompts, "-o", out, "--model", t5, "--quiet")
    for flags in ((), ("--batch-size", 1, "--overwrite")):
        assert command(*words, "--json-schema", file(tmp_path, SCHEMA), *flags).code == 0
        texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
        assert len(texts) == 3 and all(re.fullmatch(OBJECT, text) for text in texts)
    out.unlink()
    begun = (*words, "--batch-size", 1, "--json-schema")
    with interrupted(lambda _: any("text" in file.read_text() for file in tmp_path.glob("out*"))):
        assert command(*begun, file(tmp_path, SCHEMA)).code == 130
    refused = command(*begun, file(tmp_path, SCHEMA.replace("1, 2", "3")))
    assert len(refused.err) < 600
    refused.refuses("json-schema")
    assert command(*begun, file(tmp_path, SCHEMA)).code == 0 and out.is_file()


def test_a_missing_extra_is_reported_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    done = command("generate", "x", "--regex", "an (extra|missing) one", "--model", "./nowhere")
    done.refuses("llguidance")
