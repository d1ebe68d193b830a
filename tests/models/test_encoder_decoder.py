"""The contract of contexts, kept by T5: what may be taken back, and what is told."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.errors import OptionError, PromptError, RewindError
from mlx_specdec.interfaces import FINAL, after
from mlx_specdec.models.encoder_decoder.context import EncoderDecoderModel
from mlx_specdec.models.loading import load_model

FIXTURE = Path(__file__).parents[1] / "fixtures" / "t5" / "own-head-scaled"


@pytest.fixture(scope="module")
def model() -> EncoderDecoderModel:
    return load_model(FIXTURE, dtype="float32").model


def tokens(*ids: int) -> mx.array:
    return mx.array([ids], dtype=mx.int32)


def test_a_source_is_read_once_and_not_before_somebody_waits(model, monkeypatch) -> None:
    read, encode = [], type(model.network).encode

    def reading(network, sources, mask=None):
        read.append(sources.tolist())
        return encode(network, sources, mask)

    monkeypatch.setattr(type(model.network), "encode", reading)
    for begin in (lambda each: each.evaluate(), lambda each: each.advance(tokens(0))):
        context = model.open([5, 6, 1])
        assert read == []
        begin(context)
        assert read == [[[5, 6, 1]]]
        context.advance(tokens(7))
        assert len(read) == 1
        read.clear()


def test_only_proposed_tokens_can_be_taken_back(model) -> None:
    context = model.open([5, 6, 1])
    context.advance(tokens(0, 7, 8, 9), proposed=2)
    for wrong in (5, 1, -1):
        with pytest.raises(RewindError, match="4 were seen and 2 are final"):
            context.rewind((wrong,))
    context.rewind((3,))
    assert context.lengths == (3,)
    with pytest.raises(RewindError, match="3 are final"):
        context.rewind((2,))


@pytest.mark.parametrize(("prompt", "message"), [([], "empty"), ([5, 64], "64"), ([-1], "-1")])
def test_a_prompt_that_cannot_be_read_is_refused(model, prompt: list[int], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        model.open(prompt)


def test_every_layer_of_the_decoder_shows_what_it_puts_out(model) -> None:
    names = [after(layer) for layer in range(model.layers)]
    fed = tokens(0, 7, 8)
    plain = model.open([5, 6, 1]).advance(fed)
    scores = model.open([5, 6, 1]).advance(fed, taps=(*names, FINAL))
    assert mx.array_equal(scores.logits, plain.logits) and not plain.hidden
    assert {scores.hidden[name].shape for name in names} == {(1, 3, model.width)}
    decoder = model.network.decoder
    normed = decoder.final_layer_norm(scores.hidden[names[-1]])
    scale = model.network.config.d_model**-0.5 if model.network.config.scales_output else 1.0
    assert mx.allclose(normed * scale, scores.hidden[FINAL])
    assert mx.allclose(model.embed(fed), model.network.shared(fed))
    with pytest.raises(OptionError, match=rf"'{after(model.layers)}'"):
        model.open([5, 6, 1]).advance(fed, taps=(after(model.layers),))
