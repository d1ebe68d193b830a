"""Hundreds of rounds in one text, with what is accepted forced from outside, in every family.

The debugging shadow is on: every context is compared with the committed tokens and with one that
was never rewound.
"""

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import RewindError
from mlx_specdec.interfaces import Model, Noise, Proposal, Proposer, Scores
from mlx_specdec.interfaces.records import Result
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.encoder_decoder.context import EncoderDecoderContext
from mlx_specdec.models.mlx_lm.context import DecoderOnlyContext
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.mlx_lm.states import States
from mlx_specdec.models.rows import Window
from mlx_specdec.options import Options

from ..support import tiny
from ..support.pairs import ONE_OF_EACH_CACHE, PROMPT, SIZE, encoder_decoder, pair_of
from ..support.shadows import CheckedModel

DRAFTED = 4
SHORT, LONGEST = 80, 330
"""Tokens of texts that are long enough for some dozen rounds, and for all here."""
pytestmark = pytest.mark.usefixtures("shadowed")

FAMILIES = (
    "llama",
    "gemma3_wrapped",
    "mamba2",
    "qwen3_next",
    "own-head-scaled",
    "llama, newest 16 tokens",
    "qwen3, cache of 8 bits",
)
SMALLER = {
    "llama, newest 16 tokens": CacheSettings(max_size=16),
    "qwen3, cache of 8 bits": CacheSettings(8, 32),
}
PATTERNS: dict[str, Callable[[int], int]] = {
    "none": lambda index: 0,
    "all": lambda index: DRAFTED,
    "alternating": lambda index: DRAFTED * (index % 2),
    "random": lambda index: (index * 2654435761 >> 7) % (DRAFTED + 1),
}


class Forced(Proposer):
    """Knows the text to come: as many drafted tokens as the pattern says are right.

    The draft model sees and forgets the same tokens, so that its context is exercised too.
    """

    def __init__(self, draft: Model, text: Sequence[int], pattern: Callable[[int], int]) -> None:
        self._draft = CheckedModel(draft)
        self._text = list(text)
        self._pattern = pattern
        self._observed: list[int] = []
        self.rounds = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        [prompt] = prompts
        self._context = self._draft.open(prompt)
        self._prefix = len(self._draft.prefix(prompt))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        place = len(committed[0]) - self._prefix
        right = self._text[place : place + limit]
        right += [0] * (limit - len(right))
        good = self._pattern(self.rounds)
        guess = [t if k < good else (t + 1) % SIZE for k, t in enumerate(right)]
        unseen = list(committed[0][self._context.lengths[0] :])
        self._context.advance(mx.array([unseen], dtype=mx.int32))
        for token in guess[:-1]:
            self._context.advance(mx.array([[token]], dtype=mx.int32), proposed=1)
        self.rounds += 1
        return Proposal.one_hot([guess])

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        self._observed += tokens[0]
        self._context.rewind((min(self._context.lengths[0], len(self._observed)),))
        unseen = 0
        self._draft.compare([*self._observed, unseen])


@functools.cache
def pair_for(family: str) -> Pair:
    if family == "own-head-scaled":
        return encoder_decoder(family, 0.1)
    shape = {"head_dim": 32} if family in SMALLER else {}
    target, draft = (
        DecoderOnlyModel(tiny.build(family.split(",")[0], **shape), caches=SMALLER.get(family))
        for _ in range(2)
    )
    return pair_of(target, draft)


@functools.cache
def plain_text(family: str, most: int, seed: int) -> tuple[int, ...]:
    options = Options(max_tokens=most, regular=True, temperature=0.9, seed=seed)
    return generate(pair_for(family), PROMPT, options).tokens


def forced(pair: Pair, text: Sequence[int], pattern: str, **settings) -> tuple[Result, Forced]:
    """A text whose proposals are right as the pattern says."""
    forcing = Forced(pair.draft, text, PATTERNS[pattern])
    options = Options(num_draft=DRAFTED, temperature=0.9, **settings)
    return stream_generate(pair, PROMPT, options, proposer=forcing).result(), forcing


def needed(pattern: str, rounds: int) -> int:
    return sum(PATTERNS[pattern](index) + 1 for index in range(rounds))


def compare(family: str, pattern: str, rounds: int) -> None:
    length = needed(pattern, rounds)
    assert length <= LONGEST
    # A text is computed once for all patterns.
    text = plain_text(family, LONGEST if length > SHORT else SHORT, seed=4)[:length]
    result, forcing = forced(pair_for(family), text, pattern, max_tokens=length, seed=4)
    assert result.tokens == text
    assert forcing.rounds >= rounds - 2
    expected = length - rounds
    assert abs(result.stats.accepted - expected) <= DRAFTED + 1


@pytest.mark.slow
def test_over_a_hundred_rounds_keep_every_context_right() -> None:
    compare("llama", "random", 105)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if pattern != "random"])
@pytest.mark.parametrize("family", ONE_OF_EACH_CACHE)
def test_whatever_is_accepted_every_context_stays_right(family: str, pattern: str) -> None:
    """Where all is, the text is longer than the 256 rows by which caches of mlx-lm grow."""
    compare(family, pattern, 54 if pattern == "all" else 25)


@pytest.mark.parametrize("family", FAMILIES)
def test_dozens_of_rounds_keep_every_context_right(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    compare(family, "random", 25)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_recurrent_state_that_was_not_taken_back_is_noticed(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    assert pair_for(family).target.rows_agree  # its trials would notice, too
    monkeypatch.setattr(States, "rewind", lambda self, lengths, now: None)
    with pytest.raises(RewindError, match="never rewound"):
        compare(family, "random", 25)


@pytest.mark.parametrize("family", ["gemma3_wrapped", "llama, newest 16 tokens"])
def test_a_window_that_ends_a_token_too_early_is_noticed(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Planted: a pass of several rows loses the oldest token that its first row sees."""
    assert pair_for(family).target.rows_agree  # its trials would notice, too
    begin = Window.begin

    def late(window: Window) -> int:
        first: int = begin.__get__(window)
        return first + (first > 0 and window.place.rows > 1)

    monkeypatch.setattr(Window, "begin", property(late))
    with pytest.raises(RewindError, match="never rewound"):
        compare(family, "random", 25)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3, cache of 8 bits"])
def test_a_rewind_that_drops_one_row_too_few_is_noticed(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Planted: the rejected row stays, and the newest kept one goes; lengths look right."""
    shipped = DecoderOnlyContext.rewind

    def careless(self: DecoderOnlyContext, lengths: tuple[int, ...]) -> int:
        [seen], [length] = self.lengths, lengths
        passes = shipped(self, lengths)
        for cache in self._caches if seen > length else ():
            for array in cache.state:
                array[..., length - 1, :] = array[..., length, :]
        return passes

    monkeypatch.setattr(DecoderOnlyContext, "rewind", careless)
    with pytest.raises(RewindError, match="never rewound"):
        compare(family, "random", 25)


def test_a_t5_rewind_that_forgets_a_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = EncoderDecoderContext.rewind

    def careless(self: EncoderDecoderContext, lengths: tuple[int, ...]) -> int:
        passes = shipped(self, lengths)
        for cache in self._caches:
            cache._keys.array[:, :, lengths[0] - 1] = 0
        return passes

    monkeypatch.setattr(EncoderDecoderContext, "rewind", careless)
    with pytest.raises(RewindError, match="never rewound"):
        compare("own-head-scaled", "random", 25)


def test_a_loop_that_feeds_the_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_for("llama")
    shipped = Forced.propose

    def careless(self: Forced, committed, limit: int, noise: Noise) -> Proposal:
        [text] = committed
        return shipped(self, [[*text[:-1], (text[-1] + 1) % SIZE]], limit, noise)

    monkeypatch.setattr(Forced, "propose", careless)
    with pytest.raises(RewindError, match="is committed"):
        forced(pair, [1] * 100, "none", max_tokens=40)
