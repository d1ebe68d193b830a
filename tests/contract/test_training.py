"""`train-draft` and `train-medusa` learn, go on after an interruption, and write what drafts."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from .interruption import each_computation, interrupted
from .support import Outcome, checkpoint, command, moved
from .translators import translator

TEXTS = ["some words", "other words of", "some of other words"] * 3
"""The held-out texts are also trained on, because random models cannot generalize."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target of each family, and a draft for the translator."""
    place = tmp_path_factory.mktemp("models")
    made = {"llama": checkpoint(place / "llama"), "t5": translator(place / "t5")}
    return made | {"draft": moved(made["t5"], place / "draft", 0.1)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "texts"
    file.write_text("".join(f"{text}\n" for text in TEXTS))
    return file


def losses(done: Outcome) -> list[float]:
    """Return the held-out losses of the start, if it has any, and of all epochs."""
    return [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", done.err)]


def weights(directory: Path) -> dict[str, mx.array]:
    [file] = directory.glob("*.safetensors")
    found: Any = mx.load(str(file))
    return dict(found)


def answer(*arguments: object) -> Any:
    words = ("--prompt", TEXTS[0], "--max-tokens", 12, "--no-cost-cache", "--json")
    done = command("generate", *arguments, *words)
    assert done.code == 0, done.err
    return json.loads(done.out)


SHORT = ("--batch", 2, "--lr", 0.01, "--length", 24, "--epochs", 4)
TRAININGS: dict[str, tuple[object, ...]] = {
    "draft": ("train-draft", *SHORT, "--draft-model"),
    "layers": ("train-draft", *SHORT, "--layers", 1),
    "dspark": ("train-draft", *SHORT, "--kind", "dspark", "--num-draft", 3),
    "medusa": (
        "train-medusa",
        "--heads",
        2,
        "--length",
        24,
        "--epochs",
        3,
        "--batch",
        16,
        "--lr",
        0.02,
    ),
}


@pytest.mark.parametrize(
    ("kind", "family", "share"),
    [
        ("draft", "t5", 0.8),
        ("layers", "llama", 0.9),
        ("dspark", "llama", 0.9),
        ("dspark", "t5", 0.8),
        ("medusa", "llama", 0.7),
    ],
)
def test_a_training_learns_goes_on_after_an_interruption_and_its_result_drafts(
    kind: str, family: str, share: float, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """share: After which share of all computations the training is interrupted."""
    target = models[family]
    words = (*TRAININGS[kind], *([models["draft"]] if kind == "draft" else []))
    words = (*words, "--model", target, "--data", data, "--output")
    asked: list[int] = []
    with each_computation(asked.append):
        done = command(*words, tmp_path / "whole")
    assert (done.code, done.out) == (0, ""), done.err
    before, *after = losses(done)
    # Heads do not learn the completions of a random model, which follow no rule.
    assert min(after) < before or kind == "medusa"
    assert str(tmp_path / "whole") in done.err.splitlines()[-1]
    with interrupted(lambda count: count == round(share * len(asked))):
        done = command(*words, tmp_path / "broken")
    assert done.code == 130
    assert done.err.splitlines()[-1] == "interrupted: the same command goes on from here"
    assert not (tmp_path / "broken").exists(), "nothing half-written"
    for file in tmp_path.rglob("*.bin"):
        # As a machine leaves a file that crashes while it is written.
        file.write_bytes(file.read_bytes() + b"abc")
    done = command(*words, tmp_path / "broken")
    assert done.code == 0 and "with what an earlier run had left" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "whole", "broken"}
    found, expected = weights(tmp_path / "broken"), weights(tmp_path / "whole")
    assert found.keys() == expected.keys()
    close = 1e-3 if kind == "medusa" else 0.0
    assert all(mx.allclose(found[name], expected[name], rtol=0, atol=close) for name in found)
    if kind != "medusa":
        assert {array.dtype for array in found.values()} == {mx.bfloat16}
        told = json.loads((tmp_path / "whole" / "provenance.json").read_text())
        assert (
            told["best_epoch"] > 0 and {"config.json", "model.safetensors"} <= told["files"].keys()
        )
        assert str(tmp_path) not in json.dumps(told) and str(target.parent) not in json.dumps(told)
    plain = answer("--model", target, "--regular-decode")
    pair = (
        (target, "--draft-model", tmp_path / "whole") if kind != "medusa" else (tmp_path / "whole",)
    )
    proposer = {"layers": "draft"}.get(kind, kind)
    drafted = answer("--model", *pair, "--proposer", proposer, "--num-draft", 2)
    assert drafted["tokens"] == plain["tokens"] and drafted["proposer"] == proposer
    assert drafted["stats"]["drafted"] > 0
    assert drafted["stats"]["accepted"] > 0 or kind == "medusa"
    assert answer("--model", *pair)["tokens"] == plain["tokens"]


@pytest.mark.parametrize(("family", "own_output"), [("llama", False), ("t5", True)])
def test_heads_learn_what_can_be_learned(
    family: str, own_output: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    data, output = tmp_path / "texts", tmp_path / "heads"
    row = {"prompt": "the keys", "target": "qwertzuiop"}
    data.write_text(f"{json.dumps(row)}\n" * 12)
    words = ("train-medusa", "--model", models[family], "--data", data, "--output", output)
    how = ("--no-self-distill", "--heads", 2, "--batch", 16, "--lr", 0.02, "--epochs", 10)
    done = command(*words, *how, *(["--own-output"] if own_output else []))
    for head in (1, 2):
        assert f"head {head} top-1 100.0% top-5 100.0%" in done.err.splitlines()[-1], done.err
    outputs = {"0.1.weight", "1.1.weight"} if own_output else set()
    assert weights(output).keys() == outputs | {
        f"{head}.0.linear.{part}" for head in range(2) for part in ("weight", "bias")
    }
    config = json.loads((output / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)
    base = output / config["base_model_name_or_path"]
    assert base.resolve() == models[family].resolve()
