"""A batch goes through the same loop: each text is what it would be alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlx_specdec.contracts import Noise, Proposal, Proposer, Scores
from mlx_specdec.decoding.draft_length import FixedLength
from mlx_specdec.decoding.loop import Decoding
from mlx_specdec.decoding.prompt import PromptReader
from mlx_specdec.decoding.sequence import Batch
from mlx_specdec.decoding.sequence import Sequence as Decoded
from mlx_specdec.decoding.statistics import Recorder
from mlx_specdec.decoding.stop_criteria import StopCriteria
from mlx_specdec.decoding.stopwatch import Stopwatch
from mlx_specdec.sampling.distribution import Distribution
from mlx_specdec.sampling.noise import CoupledNoise, SilentNoise
from mlx_specdec.sampling.settings import Sampling
from mlx_specdec.verification.coupled import Coupled

from .mocks import VOCABULARY, LetterStream, TableContext, decoding, figures, run

ROOM = 25
SETTINGS = (
    Sampling(),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=0.8, top_k=9),
    Sampling(temperature=1.2, top_p=0.7),
    Sampling(temperature=1.0, frequency_penalty=0.3),
)


class TableBatch:
    """One TableContext per sequence, fed the rows of a rectangle."""

    replays = False

    def __init__(self, batch: int) -> None:
        self.rows = [TableContext() for _ in range(batch)]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(row.lengths[0] for row in self.rows)

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        parts = [row.advance(tokens[i : i + 1], proposed) for i, row in enumerate(self.rows)]
        return Scores(mx.concatenate([part.logits for part in parts]))

    def rewind(self, lengths: tuple[int, ...]) -> None:
        for row, length in zip(self.rows, lengths, strict=True):
            row.rewind((length,))

    def evaluate(self) -> None:
        pass


class PartlyRight(Proposer):
    """Knows the texts, errs at random, and proposes another number for every sequence."""

    def __init__(self, texts: Sequence[Sequence[int]], seed: int) -> None:
        self._texts = texts
        self._dice = random.Random(seed)
        self.seen: list[list[int]] = [[] for _ in texts]

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        return Proposal.of(
            [
                self._guess(text[len(done) - 1 :], limit)
                for text, done in zip(self._texts, committed, strict=True)
            ]
        )

    def _guess(self, right: Sequence[int], limit: int) -> list[int]:
        count = self._dice.randint(0, min(limit, len(right)))
        wrong = (self._dice.random() < 0.3 for _ in range(count))
        pairs = zip(right[:count], wrong, strict=True)
        return [(token + 1) % VOCABULARY if bad else token for token, bad in pairs]

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        for row, (seen, kept) in enumerate(zip(self.seen, tokens, strict=True)):
            seen += kept
            assert scores[row].logits.shape == (1, len(kept), VOCABULARY)


def one(number: int, eos: Sequence[int]) -> Decoded:
    settings = SETTINGS[number]
    noise = CoupledNoise(number, VOCABULARY) if settings.temperature else SilentNoise()
    stop = StopCriteria(eos=eos, max_tokens=ROOM - number, stream=LetterStream(), stops=None)
    return Decoded([1 + number], Distribution(settings, VOCABULARY), noise, stop)


def alone(number: int, eos: Sequence[int]) -> list[int]:
    """The same sequence without neighbors and without speculation."""
    settings = SETTINGS[number]
    noise = CoupledNoise(number, VOCABULARY) if settings.temperature else None
    prompt = [1 + number]
    loop = decoding(
        TableContext(),
        None,
        room=ROOM - number,
        eos=eos,
        settings=settings,
        noise=noise,
        prompt=prompt,
    )
    return run(loop)[0]


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_text_is_what_it_is_alone(count: int, seed: int) -> None:
    eos = [seed + 5]
    expected = [alone(number, eos) for number in range(len(SETTINGS))]
    context, recorder = TableBatch(len(SETTINGS)), Recorder()
    lengths = FixedLength(count)
    proposer = PartlyRight(expected, seed)
    loop = Decoding(
        target=context,
        proposer=proposer,
        rule=Coupled(),
        batch=Batch([one(number, eos) for number in range(len(SETTINGS))]),
        draft_length=lengths,
        reader=PromptReader(context, [0], [0]),
        watch=Stopwatch([recorder, lengths]),
    )
    texts: list[list[int]] = [[] for _ in SETTINGS]
    ended = False
    while not ended:
        emissions = loop.step()
        for text, emission in zip(texts, emissions, strict=True):
            text += emission.tokens
        ended = all(emission.finish_reason for emission in emissions)
    assert texts == expected
    assert len({len(text) for text in texts}) > 1, "they end at different times"
    stats = figures(recorder)
    assert sum(stats.drafted_by_position) == stats.drafted
    assert (stats.accepted > 0) == (count > 0)
    assert stats.smallest_margin is not None
    for number, seen in enumerate(proposer.seen):
        whole = [1 + number, *expected[number]]
        assert seen[: len(whole)] == whole[: len(seen)]
