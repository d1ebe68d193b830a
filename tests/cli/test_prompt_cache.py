"""generate --prompt-cache-dir: what it keeps."""

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
    kept = ("--prompt-cache-dir", file)
    alone = generated(run, PROMPT, *model)
    only = generated(run, PROMPT, *model, *kept, "-m", 0)
    assert (only["text"], only["cached_tokens"]) == ("", 0) and file.is_dir()
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
    kept = ("--prompt-cache-dir", tmp_path / "sources")
    texts = [generated(run, *arguments, *kept) for _ in range(2)]
    assert texts[0]["text"] == texts[1]["text"] == generated(run, *arguments)["text"]
    assert [each["cached_tokens"] for each in texts] == [0, texts[0]["prompt_tokens"]]


def test_what_another_model_kept_is_not_read(
    run: Run, llama: Path, t5: Path, tmp_path: Path
) -> None:
    kept = ("--prompt-cache-dir", tmp_path / "prompts")
    for model in (llama, t5):
        alone = generated(run, PROMPT, "--model", model, "-m", 4)
        texts = [generated(run, PROMPT, "--model", model, *kept, "-m", 4) for _ in range(2)]
        assert [each["text"] for each in texts] == [alone["text"]] * 2
        assert texts[0]["cached_tokens"] == 0 < texts[1]["cached_tokens"]
