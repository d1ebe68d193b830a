"""Prompts -> hidden states of the model and the tokens that followed, sample by sample.

Knows a loaded model and its tokenizer. Knows nothing of heads. The base is frozen, so its states
are computed once, however often heads look at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..assemble import Pair
from ..contracts import FINAL, Progress
from ..decoding.prompt import PromptReader
from ..errors import PromptError
from ..models.encoder_decoder import EncoderDecoderModel
from .data import Sample
from .rows import Rows
from .settings import Collecting
from .writing import Order, batches, write


@dataclass(frozen=True)
class Piece:
    """Token ids of one sample; no continuation where the model is to write it."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


def collect(
    pair: Pair,
    samples: Sequence[Sample],
    settings: Collecting,
    rows: Rows,
    progress: Progress,
) -> None:
    """Fill `rows`, going on behind the samples that they have.

    Raises PromptError where fewer than two samples are of use.
    """
    settings = _within(pair, settings)
    pieces = list(_pieces(pair, samples, settings))[: settings.samples]
    done = len(rows.lengths)
    progress(min(done, len(pieces)), len(pieces))
    for prompt, tokens in _texts(pair, pieces, settings, done):
        # One token has a state that predicts it, and none after it for a head to guess.
        if len(tokens) < 2:
            rows.append((), None)
        else:
            rows.append(tokens, _states(pair, prompt, tokens))
        done += 1
        progress(done, len(pieces))
    if int((rows.lengths > 0).sum()) < 2:
        raise PromptError(
            "the data has fewer than two texts to learn from: give more of them"
            + ("" if settings.self_distill else ', with "target" for an encoder-decoder model')
        )


def prompts(pair: Pair, samples: Sequence[Sample], settings: Collecting) -> list[tuple[int, ...]]:
    """What stands before each sample of the rows that `collect` fills, in their order."""
    settings = _within(pair, settings)
    pieces = list(_pieces(pair, samples, settings))[: settings.samples]
    if not settings.self_distill:
        return [piece.prompt for piece in pieces]
    return [pieces[number].prompt for batch in _batches(pieces, settings) for number in batch]


def _within(pair: Pair, settings: Collecting) -> Collecting:
    """No text is longer than the model takes."""
    longest = pair.target.max_length
    if longest is None or longest >= settings.length:
        return settings
    return replace(settings, length=longest)


def _pieces(pair: Pair, samples: Sequence[Sample], settings: Collecting) -> Iterator[Piece]:
    for sample in samples:
        prompt = tuple(_prompt(pair, sample.prompt, settings))
        if isinstance(pair.target, EncoderDecoderModel):
            target = pair.tokenizer.encode(sample.target)[: settings.length]
            if 0 < len(prompt) <= settings.length:
                if settings.self_distill:
                    yield Piece(prompt, ())
                elif sample.target.strip():
                    yield Piece(prompt, tuple(target))
        elif settings.self_distill:
            # Half of the length is for what the model writes.
            yield from (Piece(part, ()) for part in _parts(prompt, settings.length // 2) if part)
        elif sample.target.strip():
            target = pair.tokenizer.encode(sample.target)
            room = settings.length - len(prompt)
            if prompt and room > 1:
                yield Piece(prompt, tuple(target[:room]))
        else:
            for part in _parts(prompt, settings.length):
                if len(part) > 2:
                    yield Piece(part[:1], part[1:])


def _parts(ids: tuple[int, ...], length: int) -> Iterator[tuple[int, ...]]:
    return (ids[start : start + length] for start in range(0, len(ids), length))


def _prompt(pair: Pair, text: str, settings: Collecting) -> list[int]:
    if settings.self_distill and pair.tokenizer.has_chat_template:
        return pair.tokenizer.apply_chat(text)
    return pair.tokenizer.encode(text)


def _texts(
    pair: Pair, pieces: Sequence[Piece], settings: Collecting, done: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and continuation of every piece but the first `done` in the order of learning."""
    if not settings.self_distill:
        yield from ((piece.prompt, piece.continuation) for piece in pieces[done:])
        return
    for batch in _batches(pieces, settings):
        # Of a batch that was cut off, the rest: a text is the same in whatever batch.
        rest, done = batch[done:], max(0, done - len(batch))
        orders = [_order(pair, pieces[number], settings, number) for number in rest]
        texts = write(pair, orders, settings.temperature) if orders else []
        yield from ((order.prompt, text) for order, text in zip(orders, texts, strict=True))


def _batches(pieces: Sequence[Piece], settings: Collecting) -> list[list[int]]:
    """Numbers of the pieces that are written together, in the order of learning."""
    lengths = [len(piece.prompt) for piece in pieces]
    return batches(lengths, settings.texts_at_once, settings.seed)


def _order(pair: Pair, piece: Piece, settings: Collecting, number: int) -> Order:
    room = settings.length
    if not isinstance(pair.target, EncoderDecoderModel):
        room -= len(piece.prompt)
    return Order(piece.prompt, room, settings.seed + number)


def _states(pair: Pair, prompt: Sequence[int], tokens: Sequence[int]) -> mx.array:
    """(len(tokens), width): row j is what predicts token j."""
    context, prefix = pair.target.open(prompt), pair.target.prefix(prompt)
    reader = PromptReader(context, prefix, prompt)
    while not reader.done:
        reader.step()
    fed = [prefix[-1], *tokens[:-1]]
    return context.advance(mx.array([fed], dtype=mx.int32), taps=(FINAL,)).hidden[FINAL][0]
