"""What cannot generate text is refused by name, converted or loaded, in every format."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.t5 import scales_output

from ..support.checkpoints import T5, t5_weights, write_t5


def refused(source: Path, out: Path) -> list[str]:
    messages = []
    for act in (lambda: convert(str(source), out), lambda: load_model(source)):
        with pytest.raises(CheckpointError) as problem:
            act()
        messages.append(str(problem.value))
    assert not out.exists() and not any("\n" in message for message in messages)
    return messages


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
    for message in refused(source, tmp_path / "out"):
        assert f"{source} holds an encoder alone ({architecture}): take" in message


def test_a_classifier_is_refused_by_name(tmp_path: Path) -> None:
    weights = {f"transformer.{name}": array for name, array in t5_weights(T5).items()}
    weights["classification_head.dense.weight"] = weights["transformer.shared.weight"]
    changes = {"architectures": ["T5ForSequenceClassification"]}
    source = write_t5(tmp_path / "t5", changes, weights=weights)
    for message in refused(source, tmp_path / "out"):
        assert "gives labels (T5ForSequenceClassification), not text" in message


@pytest.mark.parametrize("kind", ["longt5", "prophetnet", "t5gemma", "whisper", "nllb-moe"])
def test_relatives_that_are_no_t5_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    source = write_t5(tmp_path / "t5")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    for message in refused(source, tmp_path / "out"):
        assert f"'{kind}' is not supported" in message


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"model_type": "t5"}, True),
        ({"model_type": "t5", "tie_word_embeddings": False}, False),
        ({"model_type": "umt5"}, True),
        ({"model_type": "mt5"}, False),
        ({"model_type": "t5", "tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"model_type": "t5", "tie_word_embeddings": False, "scale_decoder_outputs": True}, True),
    ],
)
def test_scaling_is_a_fact_of_its_own(config: dict[str, Any], scales: bool) -> None:
    assert scales_output(config) is scales
