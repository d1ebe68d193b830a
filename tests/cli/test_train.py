"""train-draft and train-medusa, and generate with what they wrote."""

import json
from pathlib import Path

import pytest

from ..support.commands import Run, fails


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts"
    file.write_text("some words\nother words\nmore of them\nthe last\n")
    return file


def few(output: Path) -> list[object]:
    return ["--output", output, "--epochs", 2, "--batch", 2, "--length", 32, "--lr", 0.01]


def heads(output: Path) -> list[object]:
    return ["--output", output, "--heads", 2, "--epochs", 2, "--length", 48]


def test_a_draft_is_trained_from_another_and_used(
    run: Run, texts: Path, t5: Path, t5_draft: Path, tmp_path: Path
) -> None:
    output = tmp_path / "draft"
    begun = ["--model", t5, "--draft-model", t5_draft, "--data", texts]
    done = run("train-draft", *begun, *few(output))
    assert (done.code, done.out) == (0, "")
    assert "start: held-out loss" in done.err
    assert "epoch 1: held-out loss" in done.err
    arguments = ["--model", t5, "--prompt", "words", "--max-tokens", 12, "--json"]
    plain = json.loads(run("generate", *arguments).out)
    found = json.loads(run("generate", *arguments, "--draft-model", output).out)
    assert found["tokens"] == plain["tokens"]


def test_a_draft_is_trained_from_layers(run: Run, texts: Path, llama: Path, tmp_path: Path) -> None:
    begun = ["--model", llama, "--layers", 1, "--data", texts]
    done = run("train-draft", *begun, *few(tmp_path / "draft"))
    assert done.code == 0
    assert "same first choice" in done.err.splitlines()[-1]
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_drafter_on_hidden_states_is_trained_and_used(
    family: str, run: Run, texts: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target, output = request.getfixturevalue(family), tmp_path / "drafter"
    begun = ["--kind", "dspark", "--model", target, "--data", texts, "--num-draft", 3]
    done = run("train-draft", *begun, *few(output))
    assert (done.code, done.out) == (0, "")
    lines = done.err.splitlines()
    assert lines[0].startswith("start: held-out loss")
    assert "temperature 1: " in lines[1] and lines[1].count("%") == 6
    assert lines[-1].startswith(str(output))
    arguments = ["--model", target, "--prompt", "words", "--max-tokens", 12, "--json"]
    plain = json.loads(run("generate", *arguments).out)
    found = json.loads(run("generate", *arguments, "--draft-model", output, "--num-draft", 2).out)
    assert found["tokens"] == plain["tokens"]
    assert found["proposer"] == "dspark"


def test_no_gain_is_one_line(run: Run, texts: Path, t5: Path, tmp_path: Path) -> None:
    begun = ["--model", t5, "--draft-model", t5, "--data", texts]
    done = run("train-draft", *begun, *few(tmp_path / "dra\x1bft"), "--lr", 0.3)
    assert done.code == 0
    assert "dra\\x1bft: no gain, the start is kept" in done.err.splitlines()[-1]


def test_an_interruption_is_one_line_and_leaves_no_result(
    run: Run, texts: Path, t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_specdec.training import fit

    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    begun = ["--model", t5, "--layers", 1, "--data", texts]
    with monkeypatch.context() as changed:
        changed.setattr(fit.Fit, "_evaluate", interrupt)
        done = run("train-draft", *begun, *few(tmp_path / "draft"))
    assert done.code == 130
    assert done.err.splitlines()[1:] == ["interrupted: the same command goes on from here"]
    assert not (tmp_path / "draft").exists()
    assert run("train-draft", *begun, *few(tmp_path / "draft")).code == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "either --draft-model, a draft to begin with, or --layers"),
        (["--layers", 1, "--draft-model", "x"], "either --draft-model"),
        (["--layers", 0], "layers must be 1 or more, not 0"),
        (["--layers", 9], "layers must be 1 to the target's 2, not 9"),
        (["--kind", "dspark", "--draft-model", "x"], "leave --draft-model out"),
        (["--kind", "dspark", "--num-draft", 0], "num-draft must be 1 to 32, not 0"),
        (["--kind", "eagle3"], "not one of 'draft', 'dspark'"),
        (["--layers", 1, "--samples", 1], "samples must be 2 or more"),
        (["--layers", 1, "--samples", 10**20], "--samples must be 2147483647 or less"),
        (["--layers", 1, "--epochs", 10**20], "--epochs must be 2147483647 or less"),
        (["--layers", 1, "--data", "/nowhere/texts"], "cannot read the data from /nowhere/texts"),
        (["--draft-model", "/nowhere"], "there is no directory /nowhere"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[object], said: str, run: Run, llama: Path, texts: Path, tmp_path: Path
) -> None:
    given = ["--model", llama, "--data", texts, "--output", tmp_path / "draft"]
    fails(run("train-draft", *given, *flags), said)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_of_the_other_family_is_one_line(
    run: Run, llama: Path, t5: Path, texts: Path, tmp_path: Path
) -> None:
    begun = ["--model", llama, "--draft-model", t5, "--data", texts]
    outcome = run("train-draft", *begun, "--output", tmp_path / "draft")
    fails(outcome, "give a draft of the target's own kind")


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_heads_are_trained_and_used(
    kind: str, run: Run, texts: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    done = run("train-medusa", "--model", model, "--data", texts, *heads(tmp_path / "heads"))
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
def test_bad_input_for_heads_is_one_line(
    flags: list[object], said: str, run: Run, llama: Path, texts: Path, tmp_path: Path
) -> None:
    given = ["--model", llama, "--data", texts, "--output", tmp_path / "heads"]
    fails(run("train-medusa", *given, *flags), said)
    assert list(tmp_path.iterdir()) == []


def test_medusa_without_heads_is_one_line(run: Run, llama: Path) -> None:
    outcome = run("generate", "--model", llama, "--proposer", "medusa", "--prompt", "words")
    fails(outcome, "there are no Medusa heads")
