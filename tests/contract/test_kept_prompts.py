"""`generate --prompt-cache-dir`: what it keeps, and for whom."""

import json
from pathlib import Path
from typing import Any

from .support import command

PROMPT = "def read_lines(file): return"


def generated(*words: object) -> dict[str, Any]:
    done = command("generate", *words, "--json", "--no-cost-cache")
    assert done.code == 0, done.err
    output: dict[str, Any] = json.loads(done.out)
    return output


def test_a_prompt_is_computed_once_and_continued(llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "prompts"
    model, kept = ("--model", llama, "-m", 8), ("--prompt-cache-dir", directory)
    alone = generated(PROMPT, *model)
    only = generated(PROMPT, *model, *kept, "-m", 0)
    assert (only["text"], only["cached_tokens"]) == ("", 0) and directory.is_dir()
    again = generated(PROMPT, *model, *kept)
    assert again["text"] == alone["text"]
    assert again["cached_tokens"] == again["prompt_tokens"] - 1
    # Lookup drafts from the completion that the directory has.
    known = generated(PROMPT, *model, *kept, "--proposer", "ngram", "--num-draft", 4)
    assert known["text"] == alone["text"]
    assert known["stats"]["rounds"] < known["generated_tokens"] / 2
    longer = PROMPT + alone["text"] + " x"
    assert generated(longer, *model, *kept)["text"] == generated(longer, *model)["text"]
    said = command("generate", longer, *model, *kept, "--no-cost-cache").err
    assert "more were known)" in said


def test_each_model_has_what_it_computed_itself(llama: Path, t5: Path, tmp_path: Path) -> None:
    kept = ("--prompt-cache-dir", tmp_path / "prompts")
    for model, cached in ((llama, -1), (t5, 0)):  # a translator needs no token of the prompt again
        alone = generated(PROMPT, "--model", model, "-m", 4)
        first, second = (generated(PROMPT, "--model", model, *kept, "-m", 4) for _ in range(2))
        assert first["text"] == second["text"] == alone["text"]
        assert first["cached_tokens"] == 0
        assert second["cached_tokens"] == first["prompt_tokens"] + cached
