"""What cannot generate text is refused by name, converted or loaded, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.checkpoints.files import check_numbers
from mlx_specdec.checkpoints.t5_keys import check_generates
from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.loading import load_model

from ..support.checkpoints import T5, t5_weights, write_t5

ENCODER = "encoder.block.0.layer.0.SelfAttention.q.weight"
DECODER = "decoder.block.0.layer.0.SelfAttention.q.weight"


def refused(source: Path, out: Path) -> list[str]:
    told = []
    for act in (lambda: convert(str(source), out), lambda: load_model(source)):
        with pytest.raises(CheckpointError) as problem:
            act()
        told.append(str(problem.value))
    assert not out.exists() and not any("\n" in each for each in told)
    return told


@pytest.mark.parametrize(("kind", "copies"), [("t5", False), ("umt5", True)])
def test_an_encoder_alone_is_refused_by_name(tmp_path: Path, kind: str, copies: bool) -> None:
    architecture = f"{kind.upper()}EncoderModel"
    weights = {
        name: array
        for name, array in t5_weights({**T5, "model_type": kind}).items()
        if not name.startswith("decoder.")
    }
    if copies:
        weights["encoder.embed_tokens.weight"] = weights["shared.weight"]
        weights["decoder.embed_tokens.weight"] = weights["shared.weight"]
    changes = {"model_type": kind, "architectures": [architecture], "num_decoder_layers": None}
    source = write_t5(tmp_path / "t5", changes, weights=weights)
    for told in refused(source, tmp_path / "out"):
        assert f"{source} holds an encoder alone ({architecture}), which cannot" in told


def test_a_classifier_is_refused_by_name(tmp_path: Path) -> None:
    weights = {f"transformer.{name}": array for name, array in t5_weights(T5).items()}
    weights["classification_head.dense.weight"] = weights["transformer.shared.weight"]
    changes = {"architectures": ["T5ForSequenceClassification"]}
    source = write_t5(tmp_path / "t5", changes, weights=weights)
    for told in refused(source, tmp_path / "out"):
        assert "gives labels (T5ForSequenceClassification), not text" in told


def test_an_encoder_that_labels_tokens_is_refused_by_name(tmp_path: Path) -> None:
    names = [f"transformer.{ENCODER}", "transformer.shared.weight", "classifier.weight"]
    with pytest.raises(CheckpointError, match="labels"):
        check_generates(tmp_path, {"architectures": ["T5ForTokenClassification"]}, names)


def test_a_config_that_names_the_wrong_architecture_refuses_nothing(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "t5", {"architectures": ["T5EncoderModel"]})
    convert(str(source), tmp_path / "out")
    assert load_model(tmp_path / "out").kind == "encoder-decoder"


@pytest.mark.parametrize("listed", [None, [], "T5", {"a": 1}, [None]])
def test_odd_architectures_do_no_harm(tmp_path: Path, listed: Any) -> None:
    check_generates(tmp_path, {"architectures": listed}, [ENCODER, DECODER])
    with pytest.raises(CheckpointError, match="encoder alone"):
        check_generates(tmp_path, {"architectures": listed}, [ENCODER])


@pytest.mark.parametrize("kind", ["longt5", "bart"])
def test_relatives_that_are_no_t5_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    source = write_t5(tmp_path / "t5")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    for told in refused(source, tmp_path / "out"):
        assert f"'{kind}' is not supported" in told


@pytest.mark.parametrize("value", [None, 1e4, [1e4, 5e6, 1e4]])
def test_factors_are_a_number_one_a_layer_or_none(tmp_path: Path, value: Any) -> None:
    check_numbers(tmp_path, {"rope_theta": value}, 9)
    check_numbers(tmp_path, {"text_config": {"rope_theta": value}}, 9)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "1", [], [1e4, 0]])
def test_factors_that_cannot_be_are_refused(tmp_path: Path, value: Any) -> None:
    for config in ({"rope_theta": value}, {"text_config": {"rope_theta": value}}):
        with pytest.raises(CheckpointError, match="rope_theta"):
            check_numbers(tmp_path, config, 9)
