"""train-medusa, and generate with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..support.commands import Run


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts"
    file.write_text("some words\nother words\nmore of them\n")
    return file


def few(output: Path) -> list[object]:
    return ["--output", output, "--heads", 2, "--epochs", 2, "--length", 48]


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_heads_are_trained_and_used(
    kind: str, run: Run, texts: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    done = run("train-medusa", "--model", model, "--data", texts, *few(tmp_path / "heads"))
    assert (done.code, done.out) == (0, "")
    assert "epoch 2: held-out loss" in done.err
    assert "head 2 top-1" in done.err
    arguments = ["--prompt", "words", "--max-tokens", 12, "--json"]
    plain = json.loads(run("generate", "--model", model, *arguments).out)
    for how, by in (
        ([], "auto"),
        (["--proposer", "medusa", "--num-draft", 1], "medusa"),
        (["--speculate", 2], "medusa"),
    ):
        outcome = run("generate", "--model", tmp_path / "heads", *how, *arguments)
        found = json.loads(outcome.out)
        assert (found["tokens"], found["proposer"]) == (plain["tokens"], by)
        # How much is drafted in so few tokens of `auto` is a matter of times.
        assert found["stats"]["drafted"] > 0 or not how


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--heads", 0], "heads must be 1 to 16, not 0"),
        (["--output", "heads\udcff"], "is not UTF-8: choose another --output"),
        (["--samples", 1], "samples must be 2 or more"),
        (["--data", "/nowhere/texts"], "cannot read the data from /nowhere/texts"),
        (["--model", "/nowhere"], "there is no directory /nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    flags: list[object], said: str, run: Run, llama: Path, texts: Path, tmp_path: Path
) -> None:
    given = ["--model", llama, "--data", texts, "--output", tmp_path / "heads"]
    outcome = run("train-medusa", *given, *flags)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert said in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_medusa_without_heads_is_one_line_and_exit_code_2(run: Run, llama: Path) -> None:
    outcome = run("generate", "--model", llama, "--proposer", "medusa", "--prompt", "words")
    assert outcome.code == 2
    assert "there are no Medusa heads" in outcome.err
