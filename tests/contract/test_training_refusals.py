"""What training refuses, and the layout of a trained DSpark."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from .support import Outcome, checkpoint, command
from .translators import translator


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target of each family."""
    place = tmp_path_factory.mktemp("models")
    checkpoint(place / "llama")
    translator(place / "t5")
    return place


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").write_text("some words\nother words\nmore of them\nthe last\n")


def train(kind: str, target: Path, *flags: object, output: str = "out") -> Outcome:
    words = (f"train-{kind}", "--model", target, "--data", "texts", "--output", output)
    return command(*words, "--length", 24, *flags)


LAYER = ("--layers", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "has no prompts: write one a line"),
        (b" \n\n", "has no prompts: write one a line"),
        (b"only one\n", "fewer than two texts"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b'{"prompt": "a"}\nb', "line 2 of texts is not JSON"),
        (b'{"prompt": "a"}\n[1]', "line 2 of texts must be an object"),
        (b'{"prompt": 3}', 'line 1 of texts needs "prompt"'),
        (b'{"prompt": "  "}', 'line 1 of texts needs "prompt"'),
        (b'{"turns": []}', 'line 1 of texts needs "prompt"'),
        (b'{"prompt": "a", "target": 1}', '"target" must be one'),
    ],
)
def test_data_that_nothing_can_be_learned_from_are_refused(
    text: bytes, said: str, place: Path
) -> None:
    Path("texts").write_bytes(text)
    train("medusa", place / "llama").refuses(said)
    assert not Path("out").exists()


KINDS = [("medusa", ()), ("draft", LAYER), ("draft", ("--kind", "dspark"))]


@pytest.mark.parametrize(("kind", "flags"), KINDS)
def test_an_output_that_exists_is_left_alone(
    kind: str, flags: tuple[object, ...], place: Path
) -> None:
    Path("out").mkdir()
    done = train(kind, place / "llama", *flags)
    done.refuses("out exists: delete it, or choose another --output")
    assert list(Path("out").iterdir()) == []


def test_heads_are_no_target(place: Path) -> None:
    assert train("medusa", place / "llama", "--epochs", 1, "--heads", 1).code == 0
    for kind, flags in KINDS:
        train(kind, Path("out"), *flags, output="other").refuses("give the base")
    target = ("generate", "--model", place / "llama", "--proposer", "medusa", "words")
    command(*target).refuses("there are no Medusa heads")


def test_a_dspark_is_written_as_the_package_speculators_has_it(place: Path) -> None:
    how = ("--kind", "dspark", "--layers", 2, "--num-draft", 3, "--epochs", 1)
    assert train("draft", place / "llama", *how).code == 0
    fixture = Path(__file__).parents[1] / "fixtures" / "drafters" / "dspark-rnn"
    config, reference = (
        json.loads((directory / "config.json").read_text()) for directory in (Path("out"), fixture)
    )
    extra = {"auto_map", "target_hidden_size", "transformers_version", "sliding_window_non_causal"}
    assert reference.keys() - config.keys() <= extra
    names, stored = (
        {*mx.load(str(directory / "model.safetensors"))} for directory in (Path("out"), fixture)
    )
    one_layer = {name for name in names if not name.startswith("layers.1.")}
    assert one_layer == stored - {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"}
    assert config["aux_hidden_state_layer_ids"] == [1], "layers are named by their inputs"


def test_a_translator_needs_targets_without_self_distillation(place: Path) -> None:
    train("medusa", place / "t5", "--no-self-distill").refuses('with "target"')
