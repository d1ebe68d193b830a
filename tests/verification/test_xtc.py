"""XTC by enumeration: with the coins of positions summed over, every exact rule has its law.

At each position the law is the target's own where the coin says no, and the one without top choices
where it says yes. The rules' laws are summed over all drafts, verdicts and tosses.
"""

import functools
import itertools
from collections.abc import Callable
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.sampling.distribution import Distribution, exclude_top_choices
from mlx_specdec.sampling.noise import Coins
from mlx_specdec.sampling.settings import Sampling

from ..support import block_enumeration as test_block
from ..support import coupled_enumeration as test_coupled_enumeration
from ..support.nothing import NO_DRAFT

SYMBOLS, TOKENS, THRESHOLD, PROBABILITY = 3, 3, 0.2, 0.3
Tosses = tuple[bool, ...]
Conditional = Callable[[tuple[int, ...]], np.ndarray]


def logits(seed: int, prefix: tuple[int, ...]) -> mx.array:
    generator = np.random.default_rng([seed, len(prefix), *prefix])
    return mx.array(generator.normal(size=SYMBOLS).astype(np.float32))


def law(rows: mx.array) -> np.ndarray:
    exact = np.exp(np.array(rows, dtype=np.float64))
    return exact / exact.sum()


def tossed(seed: int, tosses: Tosses, monkeypatch: pytest.MonkeyPatch) -> Conditional:
    """The shipped law of each position, whose coins are given."""
    settings = Sampling(temperature=1, xtc_probability=PROBABILITY, xtc_threshold=THRESHOLD)
    monkeypatch.setattr(Coins, "at", lambda self, position: position < TOKENS and tosses[position])

    @functools.cache
    def conditional(prefix: tuple[int, ...]) -> np.ndarray:
        row = logits(seed, prefix)[None, None]
        return law(Distribution(settings, SYMBOLS).log_probabilities(row, prefix, NO_DRAFT)[0, 0])

    return conditional


@functools.cache
def mixture(seed: int, prefix: tuple[int, ...]) -> np.ndarray:
    row = logits(seed, prefix)
    without = exclude_top_choices(row, THRESHOLD)
    return (1 - PROBABILITY) * law(row) + PROBABILITY * law(without)


def chance(tosses: Tosses) -> float:
    return float(np.prod([PROBABILITY if toss else 1 - PROBABILITY for toss in tosses]))


def in_fractions(model: Conditional) -> test_coupled_enumeration.Model:
    @functools.cache
    def conditional(prefix: tuple[int, ...]) -> tuple[Fraction, ...]:
        # Few digits, so that sums of products stay small; what is excluded stays excluded.
        weights = [int(1000 * p) + int(p > 0) for p in model(prefix)]
        return tuple(Fraction(weight, sum(weights)) for weight in weights)

    return conditional


@pytest.mark.parametrize("rule", [test_block.token_lengths, test_block.block_lengths])
@pytest.mark.parametrize("seed", range(2))
def test_texts_have_the_law_of_xtc(
    rule: test_block.Kept, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed: dict[tuple[int, ...], float] = {}
    changed = 0
    for tosses in itertools.product([False, True], repeat=TOKENS):
        target, draft = (tossed(s, tosses, monkeypatch) for s in (seed, seed + 100))
        changed += any(0 in target(prefix) for prefix in [(), (0,), (1, 2)])
        joint, _ = test_block.joint(target, draft, rule, 2, TOKENS)
        for text, weight in joint.items():
            summed[text] = summed.get(text, 0.0) + chance(tosses) * weight
    assert changed > 0, "nothing was ever excluded"
    assert test_block.distance(lambda prefix: mixture(seed, prefix), summed, TOKENS) < 1e-6


@pytest.mark.parametrize("tosses", list(itertools.product([False, True], repeat=TOKENS)))
def test_the_coupled_rule_has_the_law_of_every_toss(
    tosses: Tosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = (in_fractions(tossed(seed, tosses, monkeypatch)) for seed in (1, 101))
    total, _ = test_coupled_enumeration.distance(target, draft, 1, TOKENS)
    assert total == 0
