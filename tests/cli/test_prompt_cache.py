"""generate --prompt-cache-file: what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..support.commands import Run

PROMPT = "def read_lines(file): return"


def generated(run: Run, *arguments: object) -> dict[str, Any]:
    done = run("generate", *arguments, "--json", "--no-cache")
    assert done.code == 0, done.err
    output: dict[str, Any] = json.loads(done.out)
    return output


def test_a_prompt_is_read_once_and_gone_on_with(run: Run, llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    model = ("--model", llama, "-m", 8)
    kept = ("--prompt-cache-file", file)
    alone = generated(run, PROMPT, *model)
    only = generated(run, PROMPT, *model, *kept, "-m", 0)
    assert (only["text"], only["cached_tokens"]) == ("", 0) and file.is_file()
    again = generated(run, PROMPT, *model, *kept)
    assert again["text"] == alone["text"]
    assert again["cached_tokens"] == again["prompt_tokens"] - 1
    # It is drafted from what the file has of its text.
    known = generated(run, PROMPT, *model, *kept, "--proposer", "ngram", "--num-draft", 4)
    assert known["text"] == alone["text"]
    assert known["stats"]["rounds"] < known["generated_tokens"] / 2
    longer = PROMPT + alone["text"] + " x"
    assert generated(run, longer, *model, *kept)["text"] == generated(run, longer, *model)["text"]
    output = run("generate", longer, *model, *kept, "--no-cache").err
    assert "more were known)" in output


def test_a_translator_keeps_its_sources(run: Run, t5: Path, tmp_path: Path) -> None:
    arguments = ("This is a sentence.", "--model", t5, "-m", 8)
    kept = ("--prompt-cache-file", tmp_path / "sources")
    texts = [generated(run, *arguments, *kept) for _ in range(2)]
    assert texts[0]["text"] == texts[1]["text"] == generated(run, *arguments)["text"]
    assert [each["cached_tokens"] for each in texts] == [0, texts[0]["prompt_tokens"]]


def test_a_file_of_another_model_is_refused(
    run: Run, llama: Path, t5: Path, tmp_path: Path
) -> None:
    kept = ("--prompt-cache-file", tmp_path / "prompts")
    generated(run, PROMPT, "--model", llama, *kept, "-m", 1)
    before = (tmp_path / "prompts").read_bytes()
    done = run("generate", PROMPT, "--model", t5, *kept)
    assert done.code == 2 and "made for another model" in done.err and done.err.count("\n") == 1
    assert (tmp_path / "prompts").read_bytes() == before
    done = run("generate", PROMPT, "--model", llama, "--kv-bits", 8, *kept, "--kv-group-size", 32)
    assert done.code == 2 and done.err.count("\n") == 1
