"""What T5Gemma 2 reads, drops, refuses and takes. tests/contract/ compares it with transformers."""

import functools
import json
import math
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import CheckpointError, PromptError
from mlx_specdec.models import t5gemma2
from mlx_specdec.models.encoder_decoder import layers
from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5gemma2"
KINDS = ("grouped", "old")
ROWS = 40


def lines(kind: str) -> list[dict[str, list[int]]]:
    text = (FIXTURES / kind / "texts.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def fed(line: dict[str, list[int]]) -> list[int]:
    return [2, *line["text"][:-1]]


GROUPED = "grouped"
MODEL = functools.cache(lambda kind: load_model(FIXTURES / kind, dtype="float32").model)


def test_a_long_source_is_read_in_parts(monkeypatch) -> None:
    line = lines("old")[41]
    at_once = MODEL("old").network.encode(mx.array([line["source"]]))
    monkeypatch.setattr(layers, "SOURCE_ROWS", 4)
    assert mx.allclose(MODEL("old").network.encode(mx.array([line["source"]])), at_once, atol=1e-5)


def test_memory_is_priced_as_it_is_taken() -> None:
    line, model = lines(GROUPED)[20], MODEL(GROUPED)
    context = model.open(line["source"])
    context.advance(mx.array([fed(line)]))
    buffers = sum(array.nbytes for cache in context._caches for array in cache.state)
    encoded = len(line["source"]) * model.width * 4
    assert model.cache_nbytes(len(line["source"]), ROWS) == buffers + encoded


def test_the_token_of_an_image_is_refused_and_the_vision_tower_left_out(tmp_path) -> None:
    directory = shutil.copytree(FIXTURES / GROUPED, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "image_token_index": 62}))
    loaded = load_model(directory, dtype="float32")
    assert "vision tower" in loaded.note
    with pytest.raises(PromptError, match="image"):
        loaded.model.open([5, 62, 7])


def test_copies_of_the_table_are_not_read() -> None:
    names = t5gemma2.family.names({}, ["lm_head.out_proj.weight", *COPIES])
    assert names == {"model.decoder.norm.weight": "decoder.norm.weight"}


COPIES = ["model.decoder.embed_tokens.weight", "model.decoder.embed_tokens.eoi_embedding"]
COPIES += ["model.encoder.vision_tower.encoder.layers.0.mlp.fc1.bias", "decoder.norm.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_keeps_the_numbers_and_says_what_it_drops(kind: str, tmp_path: Path) -> None:
    report = convert(str(FIXTURES / kind), tmp_path / "out")
    assert all("vision" in name or "multi_modal" in name for name in report.tensor_report.dropped)
    assert any("vision" in name for name in report.tensor_report.dropped)
    loaded, line = load_model(tmp_path / "out", dtype="float32"), lines(kind)[41]
    assert loaded.note == ""
    logits = loaded.model.open(line["source"]).advance(mx.array([fed(line)])).logits[0]
    assert mx.argmax(logits, axis=-1).tolist() == line["text"]
    packed = convert(str(FIXTURES / kind), tmp_path / "packed", quantize=4, q_group_size=32)
    assert packed.written
    model = load_model(tmp_path / "packed", dtype="float32", expand=False).model
    table = model.network.model.encoder.embed_tokens
    assert (table.bits, model.network.layers[0].mlp.gate_proj.bits) == (8, 4)
    near = model.open(line["source"]).advance(mx.array([fed(line)])).logits[0]
    assert 0 < mx.abs(near - logits).mean().item() < mx.abs(logits).mean().item()


def test_the_factor_of_the_embedding_is_rounded_to_the_models_numbers() -> None:
    network, tokens = load_model(FIXTURES / GROUPED, dtype="bfloat16").model.network, mx.arange(60)
    rows, root = network.model.encoder.embed_tokens(tokens), math.sqrt(network.width)
    assert mx.array_equal(network.embed(tokens), rows * mx.array(root, dtype=mx.bfloat16))
    exact = (rows.astype(mx.float32) * root).astype(mx.bfloat16)
    assert not mx.array_equal(network.embed(tokens), exact)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "yarn"),
        ({"num_hidden_layers": 9000, "layer_types": None}, "num_hidden_layers 9000"),
    ],
)
def test_a_configuration_that_no_model_has_is_refused(changes, message, tmp_path) -> None:
    directory = shutil.copytree(FIXTURES / GROUPED, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["decoder"] |= changes
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)
