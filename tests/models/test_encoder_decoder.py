"""The contract of contexts, for every encoder-decoder fixture, and what T5 alone has to show."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.models.encoder_decoder.context import EncoderDecoderModel
from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def model() -> EncoderDecoderModel:
    return load_model(FIXTURES / "t5" / "own-head-scaled", dtype="float32").model


def tokens(*ids: int) -> mx.array:
    return mx.array([ids], dtype=mx.int32)


def test_a_source_is_read_once_and_not_before_somebody_waits(model, monkeypatch) -> None:
    read, encode = [], type(model.network).encode

    def reading(network, sources, mask=None):
        read.append(sources.tolist())
        return encode(network, sources, mask)

    monkeypatch.setattr(type(model.network), "encode", reading)
    for begin in (lambda context: context.evaluate(), lambda context: context.advance(tokens(0))):
        context = model.open([5, 6, 1])
        assert read == []
        begin(context)
        assert read == [[[5, 6, 1]]]
        context.advance(tokens(7))
        assert len(read) == 1
        read.clear()
