"""A target, proposers and a text stream small enough to know everything about."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_specdec.decoding.loop import Decoding, PromptReader
from mlx_specdec.decoding.sequence import Batch, StopCriteria
from mlx_specdec.decoding.sequence import Sequence as Decoded
from mlx_specdec.decoding.statistics import Recorder, Stopwatch
from mlx_specdec.draft_length.length import FixedLength
from mlx_specdec.errors import DAMAGED, DecodingError, RewindError
from mlx_specdec.interfaces import Noise, NoiseSource, Proposal, Proposer, Rule, Scores
from mlx_specdec.interfaces.records import Statistics, Step
from mlx_specdec.sampling.distribution import Distribution
from mlx_specdec.sampling.noise import SilentNoise
from mlx_specdec.sampling.settings import Sampling
from mlx_specdec.text.stream import StopStrings
from mlx_specdec.verification.rules import coupled

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

    def evaluate(self) -> None:
        pass

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
        """Return the output of plain decoding, computed without the code under test."""
        text = list(prefix)
        for _ in range(count):
            before = text[-2] if len(text) > 1 else 0
            text.append(int(mx.argmax(self.table[before, text[-1]]).item()))
        return text[len(prefix) :]


class Guesser(Proposer):
    """A proposer that returns `guess(position, limit)`, and records its calls.

    It is ready whenever the guess for the next position is not empty.
    """

    def __init__(
        self, guess: Callable[[int, int], list[int]], prefix: int = 1, taps: tuple[str, ...] = ()
    ) -> None:
        self.guess = guess
        self.prefix = prefix
        self.taps = taps
        self.begun: list[Sequence[int]] = []
        self.observed: list[tuple[list[int], Scores]] = []
        self.limits: list[int] = []

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.begun += prompts

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return bool(self.guess(len(committed[0]) - self.prefix, limit))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        self.limits.append(limit)
        return Proposal.one_hot([self.guess(len(committed[0]) - self.prefix, limit)[:limit]])

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        self.observed.append((list(tokens[0]), scores[0]))


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
    guesser: Proposer | None,
    *,
    count: int = 4,
    room: int = 30,
    eos: Sequence[int] = (),
    recorder: Recorder | None = None,
    settings: Sampling | None = None,
    noise: NoiseSource | None = None,
    rule: Rule | None = None,
    prompt: Sequence[int] = (1,),
    watch: Stopwatch | None = None,
) -> Decoding:
    """A decoding on the mocks; the prompt is by default the single token 1."""
    lengths = FixedLength(count)
    sequence = Decoded(
        prompt,
        Distribution(settings or Sampling(), VOCABULARY),
        noise or SilentNoise(),
        StopCriteria(eos=eos, remaining=room, stream=LetterStream(), stops=StopStrings([])),
    )
    return Decoding(
        target=context,
        proposer=guesser,
        rule=rule or coupled,
        batch=Batch([sequence]),
        draft_length=lengths,
        reader=PromptReader(context, [prompt], [prompt], guesser),
        watch=watch or Stopwatch([recorder or Recorder(), lengths]),
    )


def first_round(loop: Decoding) -> Step:
    """Read the prompt, and make one round."""
    while not loop.reader.done:
        loop.step()
    return loop.step()[0]


def run(loop: Decoding) -> tuple[list[int], str, str | None]:
    """Step to the end: tokens, text, finish reason."""
    tokens: list[int] = []
    text = ""
    emission = Step()
    while emission.finish_reason is None:
        [emission] = loop.step()
        if emission.finish_reason == "damaged":
            raise DecodingError(DAMAGED)
        tokens += emission.tokens
        text += emission.text
    return tokens, text, emission.finish_reason


def figures(recorder: Recorder) -> Statistics:
    """Return a summary without the times of loading and prefill."""
    return recorder.summary(load=0, prompt=0, decoding=1)
