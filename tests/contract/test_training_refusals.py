"""What training refuses, and which data mean the same."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from .interruption import interrupted
from .support import Outcome, checkpoint, command, moved
from .translators import translator


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target of each family, a narrow draft and a translator with a prefix."""
    place = tmp_path_factory.mktemp("models")
    checkpoint(place / "llama")
    translator(place / "t5")
    size = json.loads((place / "llama" / "config.json").read_text())["vocab_size"]
    checkpoint(place / "narrow")
    config = json.loads((place / "narrow" / "config.json").read_text())
    weights: Any = mx.load(str(place / "narrow" / "model.safetensors"))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        weights[name] = weights[name][: size - 3]
    mx.save_safetensors(str(place / "narrow" / "model.safetensors"), weights, {"format": "mlx"})
    (place / "narrow" / "config.json").write_text(json.dumps({**config, "vocab_size": size - 3}))
    config = json.loads((translator(place / "prefixed") / "config.json").read_text())
    config["task_specific_params"] = {"translation": {"prefix": "translate: "}}
    (place / "prefixed" / "config.json").write_text(json.dumps(config))
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
    ("kind", "flags", "said"),
    [
        ("draft", (), "either --draft-model, a draft to begin with, or --layers"),
        ("draft", (*LAYER, "--draft-model", "x"), "either --draft-model"),
        ("draft", ("--layers", 0), "layers must be 1 or more, not 0"),
        ("draft", ("--layers", 9), "layers must be 1 to the target's 2, not 9"),
        ("draft", (*LAYER, "--batch", 0), "batch must be 1"),
        ("draft", ("--kind", "dspark", "--draft-model", "x"), "leave --draft-model out"),
        ("draft", ("--kind", "dspark", "--layers", 0), "layers must be 1 or more"),
        ("draft", ("--kind", "dspark", "--num-draft", 0), "num-draft must be 1 to 32, not 0"),
        ("draft", ("--kind", "dspark", "--num-draft", 33), "num-draft must be 1 to 32, not 33"),
        ("draft", ("--kind", "eagle3"), "not one of 'draft', 'dspark'"),
        ("draft", (*LAYER, "--samples", 1), "samples must be 2 or more"),
        ("draft", (*LAYER, "--samples", 10**20), "--samples must be 2147483647 or less"),
        ("draft", (*LAYER, "--epochs", 10**20), "--epochs must be 2147483647 or less"),
        ("draft", (*LAYER, "--data", "/no/texts"), "cannot read the data from /no/texts"),
        ("draft", ("--draft-model", "/nowhere"), "there is no directory /nowhere"),
        ("draft", ("--draft-model", "{}/t5"), "give a draft of the target's own kind"),
        ("draft", ("--draft-model", "{}/narrow"), "of the target's 3"),
        ("medusa", ("--heads", 0), "heads must be 1 to 16, not 0"),
        ("medusa", ("--heads", 17), "heads must be 1 to 16, not 17"),
        ("medusa", ("--batch", 0), "batch"),
        ("medusa", ("--epochs", 0), "epochs"),
        ("medusa", ("--learning-rate", 0), "learning-rate"),
        ("medusa", ("--length", 7), "length must be 8"),
        ("medusa", ("--output", "heads\udcff"), "is not UTF-8: choose another --output"),
        ("medusa", ("--samples", 1), "samples must be 2 or more"),
        ("medusa", ("--data", "/no/texts"), "cannot read the data from /no/texts"),
        ("medusa", ("--model", "/nowhere"), "there is no directory /nowhere"),
    ],
)
def test_wrong_flags_are_one_line(
    kind: str, flags: tuple[object, ...], said: str, place: Path
) -> None:
    words = [flag.format(place) if isinstance(flag, str) else flag for flag in flags]
    train(kind, place / "llama", *words).refuses(said)
    assert [file.name for file in Path().iterdir()] == ["texts"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "nothing to train on"),
        (b" \n\n", "nothing to train on"),
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


def test_a_training_begins_anew_with_other_weights_under_the_same_name(place: Path) -> None:
    target = moved(place / "llama", Path("target"), 0)
    with interrupted(lambda asked: any(Path().rglob("*.bin"))):
        assert train("medusa", target, "--epochs", 1).code == 130
    moved(place / "llama", target, 0.1)
    done = train("medusa", target, "--epochs", 1)
    assert done.code == 0 and "an earlier run" not in done.err


def test_without_a_gain_the_start_is_kept(place: Path) -> None:
    start = place / "llama"
    how = ("--draft-model", start, "--batch", 2, "--lr", 0.3, "--epochs", 3)
    done = train("draft", start, *how, output="dra\x1bft")
    assert done.code == 0
    assert "dra\\x1bft: no gain, the start is kept" in done.err.splitlines()[-1]
    found: Any = mx.load("dra\x1bft/model.safetensors")
    begun: Any = mx.load(str(start / "model.safetensors"))
    assert found.keys() == begun.keys()
    assert all(mx.array_equal(found[name], begun[name].astype(mx.bfloat16)) for name in begun)


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


def heads_of(target: Path, rows: list[str], output: str, *flags: object) -> dict[str, mx.array]:
    Path("texts").write_text("".join(f"{row}\n" for row in rows))
    done = train("medusa", target, "--epochs", 1, "--heads", 1, *flags, output=output)
    assert done.code == 0, done.err
    found: Any = mx.load(f"{output}/medusa_lm_head.safetensors")
    return dict(found)


@pytest.mark.parametrize(
    ("target", "first", "second", "flags"),
    [
        (
            "prefixed",
            ["some words", "other words"],
            ["translate: some words", "translate: other words"],
            (),
        ),
        (
            "llama",
            ["", "some words", "  ", "two\\nlines"],
            [
                '{"prompt": "some words", "target": "unused", "other": 1}',
                '{"turns": ["two\\nlines", "unused"]}',
            ],
            (),
        ),
        (
            "llama",
            ['{"prompt": "a", "target": "some words"}', '{"prompt": "b", "target": "other"}'],
            ['{"text": "a", "target": "some words"}', '{"turns": ["b"], "target": "other"}'],
            ("--no-self-distill",),
        ),
    ],
    ids=["prefix", "lines", "targets"],
)
def test_data_that_mean_the_same_give_the_same_heads(
    target: str, first: list[str], second: list[str], flags: tuple[object, ...], place: Path
) -> None:
    one = heads_of(place / target, first, "one", *flags)
    two = heads_of(place / target, second, "two", *flags)
    other = heads_of(place / target, ["entirely", "different"], "three")
    assert all(mx.array_equal(one[name], two[name]) for name in one)
    assert not all(mx.array_equal(one[name], other[name]) for name in one)


def test_a_translator_needs_targets_without_self_distillation(place: Path) -> None:
    train("medusa", place / "t5", "--no-self-distill").refuses('with "target"')
