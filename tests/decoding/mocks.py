"""A target, proposers and a text stream small enough to know everything about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_specdec.contracts import Noise, NoiseSource, Proposal, Round, Rule, Scores
from mlx_specdec.decoding.draft_length import DraftLength, FixedLength
from mlx_specdec.decoding.ending import Emission, Ending
from mlx_specdec.decoding.loop import Decoding
from mlx_specdec.decoding.statistics import Recorder
from mlx_specdec.errors import RewindError
from mlx_specdec.sampling.law import Law
from mlx_specdec.sampling.noise import SilentNoise
from mlx_specdec.sampling.settings import Sampling
from mlx_specdec.verification.coupled import Coupled

VOCABULARY = 23


class TableContext:
    """A second-order Markov model; remembers every token fed and every call made."""

    def __init__(self, seed: int = 0) -> None:
        self.table = 3 * mx.random.normal(
            (VOCABULARY, VOCABULARY, VOCABULARY), key=mx.random.key(seed)
        )
        self.fed: list[mx.array] = []
        self.final = 0
        self.calls: list[tuple[int, int]] = []
        self.rewinds: list[int] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self.fed),)

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        self.calls.append((tokens.shape[1], proposed))
        rows = []
        for index in range(tokens.shape[1]):
            self.fed.append(tokens[0, index])
            before = self.fed[-2] if len(self.fed) > 1 else mx.array(0)
            rows.append(self.table[before, self.fed[-1]])
        self.final = len(self.fed) - proposed
        hidden = {name: mx.stack(rows)[None] for name in taps}
        return Scores(mx.stack(rows)[None], hidden)

    def rewind(self, lengths: tuple[int, ...]) -> None:
        if not self.final <= lengths[0] <= len(self.fed):
            raise RewindError(f"cannot go from {len(self.fed)} to {lengths[0]}")
        del self.fed[lengths[0] :]
        self.final = lengths[0]
        self.rewinds.append(lengths[0])

    def greedy(self, prefix: Sequence[int], count: int) -> list[int]:
        """What plain decoding must emit, computed without any of the code under test."""
        text = list(prefix)
        for _ in range(count):
            before = text[-2] if len(text) > 1 else 0
            text.append(int(mx.argmax(self.table[before, text[-1]]).item()))
        return text[len(prefix) :]


class Guesser:
    """Proposes what `guess(position)` says; remembers what it was told."""

    def __init__(
        self, guess: Callable[[int, int], list[int]], prefix: int = 1, taps: tuple[str, ...] = ()
    ) -> None:
        self.guess = guess
        self.prefix = prefix
        self.taps = taps
        self.begun: list[Scores | None] = []
        self.rounds: list[Round] = []
        self.limits: list[int] = []

    def begin(self, prompt: Sequence[int], scores: Scores | None) -> None:
        self.begun.append(scores)

    def propose(self, committed: Sequence[int], limit: int, noise: Noise) -> Proposal:
        self.limits.append(limit)
        tokens = self.guess(len(committed) - self.prefix, limit)[:limit]
        return Proposal(mx.array(tokens, dtype=mx.int32).reshape(1, -1))

    def observe(self, round: Round) -> None:
        self.rounds.append(round)


class LetterStream:
    """Token i is letter i; nothing is held back."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(letter(token) for token in ids)

    def finish(self) -> str:
        return ""


def letter(token: int) -> str:
    """The letter of one token."""
    return chr(ord("a") + token)


def decoding(
    context: TableContext,
    guesser: Guesser | None,
    *,
    count: int = 4,
    room: int = 30,
    eos: Sequence[int] = (),
    stops: object = None,
    recorder: Recorder | None = None,
    settings: Sampling | None = None,
    noise: NoiseSource | None = None,
    rule: Rule | None = None,
    draft_length: DraftLength | None = None,
) -> Decoding:
    """A decoding on the mocks; the prompt is the single token 1."""
    return Decoding(
        target=context,
        proposer=guesser,
        rule=rule or Coupled(),
        law=Law(settings or Sampling(), VOCABULARY),
        noise=noise or SilentNoise(),
        draft_length=draft_length or FixedLength(count),
        ending=Ending(eos=eos, room=room, stream=LetterStream(), stops=stops),
        recorder=recorder or Recorder(),
        committed=[1],
        prompt=[1],
    )


def run(loop: Decoding) -> tuple[list[int], str, str | None]:
    """Step to the end: tokens, text, finish reason."""
    tokens: list[int] = []
    text = ""
    emission = Emission((), ())
    while emission.finish_reason is None:
        emission = loop.step()
        tokens += emission.tokens
        text += emission.text
    loop.finish()
    return tokens, text, emission.finish_reason
