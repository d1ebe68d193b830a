"""What comes through a pipe or in a file: byte order marks, empty pipes, prompts for batch."""

import json
from pathlib import Path

import pytest

from .support import Outcome, checkpoint, command, process

MARK = "\ufeff"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"), template=TEMPLATE)


def generated(model: Path, *words: object, stdin: str = "") -> dict[str, object]:
    flags = ("--model", model, "-m", 4, "--json", "--no-cost-cache", "--proposer", "ngram")
    done = command("generate", *words, *flags, stdin=stdin)
    assert done.code == 0, done.err
    whole = json.loads(done.out)
    return {name: whole[name] for name in ("prompt_tokens", "tokens")}


def test_a_byte_order_mark_is_no_part_of_a_prompt(model: Path, tmp_path: Path) -> None:
    plain = generated(model, "def f")
    file = tmp_path / "prompt.txt"
    file.write_text(f"{MARK}def f\n", encoding="utf-8")
    assert generated(model, "--prompt-file", file) == plain
    assert generated(model, "-", stdin=f"{MARK}def f\n") == plain
    # Only the beginning of a file has a mark; elsewhere it is a character of the text.
    assert generated(model, "-", stdin=f"{MARK}{MARK}def f\n") != plain


def test_an_empty_pipe_is_no_wish_for_the_sample_sentence(model: Path) -> None:
    for flags, given in (((), b""), (("--model", model), f"{MARK}\n".encode())):
        process(*flags, stdin=given).refuses("standard input is empty: give a prompt there")


def batch(model: Path, prompts: object, *flags: object, stdin: str | bytes = "") -> Outcome:
    rest = ("--model", model, "-m", 4, "--no-cost-cache")
    return command("batch", prompts, "-o", "-", *rest, *flags, stdin=stdin)


def test_batch_reads_prompts_from_standard_input(model: Path, tmp_path: Path) -> None:
    lines = "def f\n\nimport os\n"
    file = tmp_path / "prompts.txt"
    file.write_text(lines)
    named = batch(model, file, "--quiet")
    assert named.code == 0 and [json.loads(line)["line"] for line in named.out.split("\n")[:-1]]
    assert batch(model, "-", "--quiet", stdin=lines) == named
    assert batch(model, "-", "--quiet", stdin=MARK + lines) == named
    objects = "".join(json.dumps({"prompt": text}) + "\n" for text in ("def f", "import os"))
    as_json = batch(model, "-", "--quiet", stdin=objects)
    texts = [json.loads(line)["text"] for line in named.out.splitlines()]
    assert [json.loads(line)["text"] for line in as_json.out.splitlines()] == texts


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("", "standard input has no prompts: write one a line"),
        (b"\xff", "standard input is not UTF-8 text (line 1)"),
        (b"a\nb\0", "standard input is binary (line 2)"),
    ],
)
def test_wrong_standard_input_of_batch_is_named(model: Path, given: str | bytes, part: str) -> None:
    batch(model, "-", stdin=given).refuses(part)
