"""Scaling and sources of T5s. tests/contract/ compares T5s with transformers."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.models.encoder_decoder import layers
from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5"


# Sources longer than what attends at a time, and longer than what a T5 was trained on.


def source(length: int, texts: int = 1) -> mx.array:
    return mx.random.randint(2, 64, (texts, length), key=mx.random.key(length))


@pytest.mark.parametrize("kind", sorted(path.name for path in FIXTURES.iterdir()))
@pytest.mark.parametrize("rows", [1, 32, 99])
def test_attention_in_parts_is_attention_at_once(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_model(FIXTURES / kind, dtype="float32").model.network
    tokens = source(100, texts=2)
    hidden = mx.arange(100) < mx.array([100, 83])[:, None, None, None]
    for mask in (None, hidden):
        at_once = network.encode(tokens, mask)
        monkeypatch.setattr(layers, "SOURCE_ROWS", rows)
        parts = network.encode(tokens, mask)
        monkeypatch.undo()
        assert mx.allclose(parts, at_once, rtol=0, atol=1e-6 * mx.abs(at_once).max().item())


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
        context = model.open_batch([[5, 6, 1]])
        assert read == []
        waits(context)
        context.advance(mx.array([[7]]))
        assert read == [[[5, 6, 1]]]
        read.clear()
