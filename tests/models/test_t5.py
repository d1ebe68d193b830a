"""Scaling and sources of T5s. tests/contract/ compares T5s with transformers."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.models.encoder_decoder import layers
from mlx_specdec.models.encoder_decoder.context import (
    EncoderDecoderModel,
)
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.t5 import T5, T5Config

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5"


@pytest.mark.parametrize(
    ("family", "stated", "tied", "scales"),
    [
        ("t5", None, None, True),
        ("t5", None, False, False),
        ("t5", True, False, True),
        ("t5", False, True, False),
        ("umt5", None, None, True),
        ("umt5", None, False, False),
        ("mt5", None, True, False),
        ("mt5", None, None, False),
    ],
)
def test_scaling_is_read_from_the_configuration_and_not_from_the_head(
    family: str, stated: bool | None, tied: bool | None, scales: bool
) -> None:
    config = json.loads((FIXTURES / "own-head-scaled" / "config.json").read_text())
    config.update(model_type=family, scale_decoder_outputs=stated, tie_word_embeddings=tied)
    if stated is None:
        del config["scale_decoder_outputs"]
    if tied is None:
        del config["tie_word_embeddings"]
    for own_head in (True, False):
        assert T5Config.from_dict(config, own_head=own_head).scales_output == scales


# Sources longer than what attends at a time, and longer than what a T5 was trained on.


SHAPE = {
    "model_type": "t5",
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
}


def source(length: int, texts: int = 1) -> mx.array:
    return mx.random.randint(2, 64, (texts, length), key=mx.random.key(length))


@pytest.mark.parametrize("kind", sorted(path.name for path in FIXTURES.iterdir()))
@pytest.mark.parametrize("rows", [1, 7, 32, 99])
def test_attention_in_parts_is_attention_at_once(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_model(FIXTURES / kind, dtype="float32").model.network
    tokens = source(100, texts=2)
    hidden = mx.arange(100)[None] < mx.array([[100], [83]])
    for mask in (None, hidden):
        at_once = network.encode(tokens, mask)
        monkeypatch.setattr(layers, "SOURCE_ROWS", rows)
        parts = network.encode(tokens, mask)
        monkeypatch.undo()
        assert mx.allclose(parts, at_once, rtol=0, atol=1e-6 * mx.abs(at_once).max().item())


@pytest.mark.slow
def test_what_a_long_source_takes_grows_with_its_length() -> None:
    wide = {**SHAPE, "num_heads": 8, "d_model": 64, "num_layers": 1}
    network = T5(T5Config.from_dict(wide, own_head=False))
    mx.eval(network.parameters())

    def peak(length: int) -> int:
        tokens = source(length)
        mx.eval(tokens)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(network.project_encoded(network.encode(tokens)))
        return mx.get_peak_memory() - before

    # Peaks vary, because MLX allocates ahead. A quadratic growth would be a factor of 9.
    short, long = peak(1024), peak(3072)
    assert long < 6 * short
    for length, taken in ((1024, short), (3072, long)):
        assert 0.5 * taken < network.source_nbytes(length) < 2 * taken


def test_a_source_is_read_once_and_not_before_somebody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model(FIXTURES / "own-head-scaled", dtype="float32").model
    read, encode = [], type(model.network).encode

    def reading(network, sources, mask=None):
        read.append(sources.tolist())
        return encode(network, sources, mask)

    monkeypatch.setattr(type(model.network), "encode", reading)
    for waits in (lambda opened: opened.evaluate(), lambda opened: opened.advance(mx.array([[0]]))):
        context = model.open([5, 6, 1])
        assert read == []
        waits(context)
        context.advance(mx.array([[7]]))
        assert read == [[[5, 6, 1]]]
        read.clear()


def test_a_long_source_can_be_interrupted_between_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = T5(T5Config.from_dict(SHAPE, own_head=False))
    monkeypatch.setattr(layers, "SOURCE_ROWS", 16)
    evaluate, done = mx.eval, []

    def interrupted(part: mx.array) -> None:
        evaluate(part)
        done.append(part)
        if len(done) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(mx, "eval", interrupted)
    with pytest.raises(KeyboardInterrupt):
        network.encode(source(40))
    assert len(done) == 2


@pytest.mark.parametrize(
    ("config", "trained"),
    [
        ({}, 512),
        ({"n_positions": 768}, 768),
        ({"model_type": "mt5"}, 1024),
        ({"tokenizer_class": "ByT5Tokenizer"}, 1024),
    ],
)
def test_beyond_what_the_family_saw_there_is_a_caution(config: dict, trained: int) -> None:
    shape = T5Config.from_dict({**SHAPE, **config}, own_head=False)
    model = EncoderDecoderModel(T5(shape))
    assert model.caution(trained) == ""
    report = model.caution(trained + 1)
    assert f"{trained + 1:,} tokens" in report and f"trained on {trained:,}" in report
    assert "MB of memory" in report
