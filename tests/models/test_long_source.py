"""Sources longer than what attends at a time, and longer than what a T5 was trained on."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.models.loading import load_model
from mlx_specdec.models.t5 import network as t5
from mlx_specdec.models.t5.config import T5Config
from mlx_specdec.models.t5.context import EncoderDecoderModel
from mlx_specdec.models.t5.network import T5

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5"
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
        whole = network.encode(tokens, mask)
        monkeypatch.setattr(t5, "SOURCE_ROWS", rows)
        parts = network.encode(tokens, mask)
        monkeypatch.undo()
        assert mx.allclose(parts, whole, rtol=0, atol=1e-6 * mx.abs(whole).max().item())


@pytest.mark.parametrize("kind", sorted(path.name for path in FIXTURES.iterdir()))
def test_a_source_of_one_part_is_encoded_as_by_one_mask(kind: str) -> None:
    network = load_model(FIXTURES / kind, dtype="float32").model.network
    encoder, tokens = network.encoder, source(t5.SOURCE_ROWS)
    states, length = network.shared(tokens), tokens.shape[1]
    masks = encoder.masks(encoder.bias_tables(length), length, 0, length)
    for block, mask in zip(encoder.block, masks, strict=True):
        attend, feed_forward = block.layer
        states = feed_forward(attend(states, mask, None))
    assert mx.array_equal(network.encode(tokens), encoder.final_layer_norm(states))


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

    # MLX runs ahead of what is computed, so that peaks vary; a square would be 9 times as much.
    short, long = peak(1024), peak(3072)
    assert long < 6 * short
    for length, taken in ((1024, short), (3072, long)):
        assert 0.5 * taken < network.source_nbytes(length) < 2 * taken


def test_a_long_source_can_be_interrupted_between_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = T5(T5Config.from_dict(SHAPE, own_head=False))
    monkeypatch.setattr(t5, "SOURCE_ROWS", 16)
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


def test_training_goes_through_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    network = T5(T5Config.from_dict(SHAPE, own_head=False))
    tokens = source(40)

    def loss(table: mx.array) -> mx.array:
        network.encoder.block[0].attention.relative_attention_bias.weight = table
        return mx.square(network.encode(tokens)).sum()

    table = mx.random.normal((32, 4), key=mx.random.key(1))
    whole = mx.grad(loss)(table)
    monkeypatch.setattr(t5, "SOURCE_ROWS", 16)
    assert mx.allclose(mx.grad(loss)(table), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "trained"),
    [
        ({}, 512),
        ({"n_positions": 768}, 768),
        ({"n_positions": None}, 512),
        ({"model_type": "mt5"}, 1024),
        ({"model_type": "umt5"}, 1024),
        ({"tokenizer_class": "ByT5Tokenizer"}, 1024),
        ({"model_type": "mt5", "n_positions": 2048}, 2048),
    ],
)
def test_beyond_what_the_family_saw_there_is_a_caution(config: dict, trained: int) -> None:
    shape = T5Config.from_dict({**SHAPE, **config}, own_head=False)
    model = EncoderDecoderModel(T5(shape))
    assert model.caution(trained) == ""
    told = model.caution(trained + 1)
    assert f"{trained + 1:,} tokens" in told and f"trained on {trained:,}" in told
    assert "MB of memory" in told
