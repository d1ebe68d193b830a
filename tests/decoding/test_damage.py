"""Logits that are no numbers end a text in one line, and what is told of a text is strict JSON."""

import json
import math

import mlx.core as mx
import pytest

from mlx_specdec.draft_length.length import FixedLength
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import DecodingError
from mlx_specdec.interfaces import Rule
from mlx_specdec.options import Options
from mlx_specdec.sampling.noise import IndependentNoise, SilentNoise
from mlx_specdec.sampling.settings import Sampling
from mlx_specdec.verification.rules import BlockRule, Coupled, TokenRule, TypicalRule

from ..support.mocks import VOCABULARY, Guesser, TableContext, decoding, run
from ..support.pairs import PROMPT, SIZE, decoder_only

WARM = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return decoder_only("llama")


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("rule", [Coupled(), TokenRule(), BlockRule(), TypicalRule(0.09, 0.3)])
def test_damaged_logits_are_an_error_under_every_rule(
    damage: float, count: int, rule: Rule
) -> None:
    context = TableContext()
    context.table = mx.full(context.table.shape, damage)
    noise = SilentNoise() if isinstance(rule, Coupled) else IndependentNoise(0, VOCABULARY)
    loop = decoding(
        context, Guesser(lambda p, n: [3] * n), count=count, rule=rule, noise=noise, settings=WARM
    )
    with pytest.raises(DecodingError, match="NaN or infinite"):
        run(loop)


@pytest.mark.parametrize("ends", ["room", "eos"])
@pytest.mark.parametrize("rule", [Coupled(), TokenRule(), BlockRule(), TypicalRule(0.09, 0.3)])
def test_what_is_damaged_behind_the_end_of_a_text_is_not_looked_at(rule: Rule, ends: str) -> None:
    """The end is inside of a draft whose last token leads to a damaged row."""
    context = TableContext()
    # One token is all but certain behind each other one, so that every rule accepts it.
    context.table = 100 * (mx.arange(VOCABULARY) == (mx.arange(VOCABULARY) + 1)[:, None])
    context.table = mx.broadcast_to(context.table, (VOCABULARY,) * 3) * 1.0
    context.table[:, 6] = math.nan
    room, eos = (4, []) if ends == "room" else (30, [5])
    noise = SilentNoise() if isinstance(rule, Coupled) else IndependentNoise(0, VOCABULARY)
    loop = decoding(
        context,
        Guesser(lambda position, limit: [*range(position + 2, position + 7)]),
        room=room,
        eos=eos,
        rule=rule,
        noise=noise,
        settings=WARM,
        draft_length=Beyond(5),
    )
    assert run(loop) == (
        [2, 3, 4, 5],
        "cdef" if ends == "room" else "cde",
        ends if eos else "length",
    )


class Beyond(FixedLength):
    """A length that is not bound by this text's room, as in a batch with longer texts."""

    def choose(self, remaining: int, rows: int = 1) -> int:
        return self.count


def test_one_damaged_logit_in_a_text_is_an_error_before_the_text_has_ended() -> None:
    context = TableContext()
    late = context.greedy([1], 12)[-1]
    context.table[:, late, 5] = math.nan
    with pytest.raises(DecodingError, match="NaN"):
        run(decoding(context, None, room=30))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 0.999999},
        {"logit_bias": dict.fromkeys(range(1, SIZE), -math.inf)},
        {"logit_bias": {3: 1e20}},
        {"max_tokens": 0},
    ],
)
def test_a_result_is_strict_json(settings: dict, pair: Pair) -> None:
    result = generate(pair, PROMPT, Options(**{"max_tokens": 5, **settings}))
    json.dumps(result.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "settings", [{}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}, {"rule": "token"}]
)
def test_extreme_temperatures_and_biases_mean_their_limits(settings: dict, pair: Pair) -> None:
    greedy = generate(pair, PROMPT, Options(max_tokens=12))
    coldest = generate(pair, PROMPT, Options(max_tokens=12, temperature=1e-30, **settings))
    assert coldest.tokens == greedy.tokens
    for temperature in (1e-30, 1.0):
        forced = Options(max_tokens=3, temperature=temperature, logit_bias={7: 1e20}, **settings)
        assert generate(pair, PROMPT, forced).tokens == (7, 7, 7)
