"""A batch goes through the same loop: each text is what it would be alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlx_specdec.decoding.loop import Decoding, PromptReader
from mlx_specdec.decoding.sequence import Batch, StopCriteria
from mlx_specdec.decoding.sequence import Sequence as Decoded
from mlx_specdec.decoding.statistics import Recorder, Stopwatch
from mlx_specdec.draft_length.length import FixedLength
from mlx_specdec.interfaces import Noise, Proposal, Proposer, Scores
from mlx_specdec.sampling.distribution import Distribution
from mlx_specdec.sampling.noise import CoupledNoise, SilentNoise
from mlx_specdec.sampling.settings import Sampling
from mlx_specdec.verification.rules import Coupled, LenientGreedy

from ..support.mocks import VOCABULARY, LetterStream, TableContext, decoding, figures, run

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

    def join(self, other: TableBatch) -> None:
        self.rows += other.rows

    def filter(self, keep: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in keep]


class PartlyRight(Proposer):
    """Knows the texts, errs at random, and proposes another number for every sequence."""

    batches = True

    def __init__(self, texts: Sequence[Sequence[int]], seed: int) -> None:
        self._texts = list(texts)
        self._dice = random.Random(seed)
        self._rows: list[list[int]] = [[] for _ in texts]
        self.seen = list(self._rows)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        return Proposal.one_hot(
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
        for row, (seen, kept) in enumerate(zip(self._rows, tokens, strict=True)):
            seen += kept
            assert scores[row].logits.shape == (1, len(kept), VOCABULARY)

    def join(self, other: PartlyRight) -> None:
        self._texts += other._texts
        self._rows += other._rows
        self.seen += other.seen

    def filter(self, keep: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in keep]
        self._rows = [self._rows[row] for row in keep]


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


def batch(
    numbers: Sequence[int], eos: Sequence[int], proposer: Proposer, lengths: FixedLength, **more
) -> tuple[Decoding, dict[Decoded, int]]:
    """A decoding of the sequences with these numbers, which has read its prompts."""
    context = TableBatch(len(numbers))
    sequences = [one(number, eos) for number in numbers]
    loop = Decoding(
        target=context,
        proposer=proposer,
        rule=more.get("rule") or Coupled(),
        batch=Batch(sequences),
        draft_length=lengths,
        reader=PromptReader(context, [[0]] * len(numbers), [[0]] * len(numbers)),
        watch=more.get("watch") or Stopwatch([lengths]),
    )
    loop.step()
    return loop, dict(zip(sequences, numbers, strict=True))


def test_what_fills_up_a_rectangle_is_never_accepted() -> None:
    """Not even by a rule that accepts everything that was proposed."""
    texts = [[7, 8, 9, 10] * 9, [11, 12] * 18, [13] * 36]

    class Certain(PartlyRight):
        def _guess(self, right: Sequence[int], limit: int) -> list[int]:
            return list(right[: right[0] % (limit + 1)])

    lengths = FixedLength(4)
    loop, _ = batch([0, 1, 0], [], Certain(texts, 0), lengths, rule=LenientGreedy(1.0))
    emissions = loop.step()
    assert [emission.drafted for emission in emissions] == [2, 1, 3]
    for emission, text in zip(emissions, texts, strict=True):
        assert [*emission.tokens[: emission.drafted]] == text[: emission.drafted]


@pytest.mark.parametrize("joins_after", [None, 0, 1, 6])
@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_text_is_what_it_is_alone(count: int, seed: int, joins_after: int | None) -> None:
    eos = [seed + 5]
    every = range(len(SETTINGS))
    expected = [alone(number, eos) for number in every]
    recorder, lengths = Recorder(), FixedLength(count)
    first = every if joins_after is None else every[::2]
    proposer = PartlyRight([expected[number] for number in first], seed)
    loop, names = batch(first, eos, proposer, lengths, watch=Stopwatch([recorder, lengths]))
    texts: list[list[int]] = [[] for _ in SETTINGS]
    going, steps = set(every), 0
    while going:
        if steps == joins_after:
            late = PartlyRight([expected[number] for number in every[1::2]], seed)
            other, more = batch(every[1::2], eos, late, lengths)
            loop.join(other)
            names |= more
        emissions = loop.step()
        steps += 1
        for sequence, emission in zip(loop.sequences, emissions, strict=True):
            texts[names[sequence]] += emission.tokens
            if emission.finish_reason:
                going.discard(names[sequence])
    assert texts == expected
    assert len({len(text) for text in texts}) > 1, "they end at different times"
    stats = figures(recorder)
    assert sum(stats.drafted_by_position) == stats.drafted
    assert (stats.accepted > 0) == (count > 0)
    assert stats.smallest_margin is not None
    order = first if joins_after is None else [*first, *every[1::2]]
    for number, seen in zip(order, proposer.seen, strict=True):
        whole = [1 + number, *expected[number]]
        assert seen[: len(whole)] == whole[: len(seen)]


# The size of batches goes to where most tokens come, and stays there.
