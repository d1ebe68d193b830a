"""The contract of contexts, for every encoder-decoder fixture, and what T5 alone has to show."""

import random
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.errors import OptionError, PromptError, RewindError
from mlx_specdec.models.encoder_decoder.context import EncoderDecoderModel
from mlx_specdec.models.loading import load_model
from mlx_specdec.types import FINAL, after, feed

FIXTURES = Path(__file__).parents[1] / "fixtures"
EVERY = [
    directory.relative_to(FIXTURES).as_posix()
    for kind in ("bart", "t5", "t5gemma2")
    for directory in sorted((FIXTURES / kind).iterdir())
]
SOURCES = [[5, 9, 12, 7, 33, 21, 8], [4, 11, 3], [30], [6, 13, 27, 40, 3, 17, 22, 9, 9, 31, 14]]
SEQUENCES = [[7 + (5 * at + 3 * row) % 40 for at in range(30)] for row in range(len(SOURCES))]


@pytest.fixture(scope="module")
def model() -> EncoderDecoderModel:
    return load_model(FIXTURES / "t5" / "own-head-scaled", dtype="float32").model


@pytest.fixture(scope="module", params=EVERY)
def of_every_family(request: pytest.FixtureRequest) -> EncoderDecoderModel:
    return load_model(FIXTURES / request.param, dtype="float32").model


def tokens(*ids: int) -> mx.array:
    return mx.array([ids], dtype=mx.int32)


def in_one_pass(model: EncoderDecoderModel, row: int) -> mx.array:
    return model.open(SOURCES[row]).advance(tokens(*SEQUENCES[row])).logits[0]


def close(logits: mx.array, expected: mx.array) -> bool:
    return bool(mx.allclose(logits, expected, rtol=1e-5, atol=1e-4).item())


def test_rewinding_and_passes_of_any_size_compute_what_one_pass_computes(of_every_family) -> None:
    sequence, dice, at = SEQUENCES[0], random.Random(1), 0
    expected, context = in_one_pass(of_every_family, 0), of_every_family.open(SOURCES[0])
    while at < len(sequence):
        count = min(dice.randint(1, 9), len(sequence) - at)
        fed = [*sequence[at : at + count], *[33] * dice.randint(0, 3)]
        logits = context.advance(tokens(*fed), len(fed) - 1).logits[0]
        assert close(logits[:count], expected[at : at + count])
        at += dice.randint(1, count)
        context.rewind((at,))
        assert context.lengths == (at,)
    with pytest.raises(RewindError, match=f"{at} were seen"):
        context.rewind((at + 1,))


def test_a_batch_computes_what_each_sequence_computes_alone(of_every_family) -> None:
    """Two sequences begin together, two join them, one leaves, and snapshots open them again."""
    context = of_every_family.open_batch(SOURCES[:2])
    feed(context, [sequence[:3] for sequence in SEQUENCES[:2]])
    joining = of_every_family.open_batch(SOURCES[2:])
    feed(joining, [sequence[:9] for sequence in SEQUENCES[2:]])
    context.merge(joining)
    context.keep([3, 0, 1])
    rows, lengths = (3, 0, 1), [9, 3, 3]
    snapshots = [context.snapshot(row).snapshot for row in range(3)]
    expected = [in_one_pass(of_every_family, row) for row in rows]
    for count in (5, 12):
        parts = [SEQUENCES[row][n : n + count] for row, n in zip(rows, lengths, strict=True)]
        logits = feed(context, parts).logits
        for rows_found, alone, n in zip(logits, expected, lengths, strict=True):
            assert close(rows_found, alone[n : n + count])
        lengths = [n + count for n in lengths]
    assert context.lengths == tuple(lengths)
    again = of_every_family.open_batch([SOURCES[row] for row in rows], snapshots)
    logits = feed(again, [SEQUENCES[row] for row in rows]).logits
    for rows_found, alone in zip(logits, expected, strict=True):
        assert close(rows_found, alone)


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
    scores = model.open([5, 6, 1]).advance(fed, hidden=(*names, FINAL))
    assert mx.array_equal(scores.logits, plain.logits) and not plain.hidden
    assert {scores.hidden[name].shape for name in names} == {(1, 3, model.width)}
    decoder = model.network.decoder
    normed = decoder.final_layer_norm(scores.hidden[names[-1]])
    scale = model.network.config.d_model**-0.5 if model.network.config.scales_output else 1.0
    assert mx.allclose(normed * scale, scores.hidden[FINAL])
    assert mx.allclose(model.embed(fed), model.network.shared(fed))
    with pytest.raises(OptionError, match=rf"'{after(model.layers)}'"):
        model.open([5, 6, 1]).advance(fed, hidden=(after(model.layers),))
