"""Rules by enumeration where a grammar binds the target: what is emitted has the law that plain
decoding has, p without what the grammar forbids and scaled to 1, whatever a draft guesses.

Masks and cuts are the shipped ones; the reference asks a constraint that no draft has ever touched.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from mlx_specdec.sampling.constraint import Constraint

from ..support.block_enumeration import Kept, Model, block_lengths, token_lengths
from ..support.coupled_enumeration import Law, distance, law
from ..support.coupled_enumeration import toy as fractions
from ..support.letters import alphabet, regex

PIECES = ("<end>", "a", "b", "ab")
END = 0
SYMBOLS = len(PIECES)
PATTERNS = ["[ab]+", "(ab|b)*a", "a(b|ab)*", "b?a{1,2}b?"]
Cut = Callable[[Constraint, tuple[int, ...]], int]
Text = tuple[int, ...]


def behind(pattern: str, prefix: Text) -> Constraint:
    constraint = alphabet(PIECES).constraint(regex(pattern), [END])
    assert constraint.take(prefix) == len(prefix)
    return constraint


def toy(seed: int) -> Model:
    """Conditionals that depend on everything before, without zeros."""

    @functools.cache
    def conditional(prefix: Text) -> np.ndarray:
        return np.random.default_rng([seed, len(prefix), *prefix]).dirichlet(np.ones(SYMBOLS))

    return conditional


def restricted(p: np.ndarray, constraint: Constraint, drafts: list[Text]) -> np.ndarray:
    """(drafts, rows, symbols): rows of p, each without what the constraint forbids behind as many
    tokens of its draft."""
    weights = np.where([constraint.masks(drafted) for drafted in drafts], p, 0.0)
    return weights / weights.sum(axis=-1, keepdims=True)


def whole(constraint: Constraint, drafted: Text) -> int:
    return constraint.verifiable(drafted)


def without_the_forbidden(constraint: Constraint, drafted: Text) -> int:
    """Mutation: the token that cannot come is dropped as well, though it was drawn."""
    rows, count = constraint.masks(drafted), constraint.verifiable(drafted)
    last = drafted[count - 1]
    return count - (not rows[count - 1, last])


def emitted(
    pattern: str, models: tuple[Model, Model], rule: Kept, n: int, tokens: int, cut: Cut = whole
) -> dict[Text, float]:
    """The law of the first `tokens` tokens, over as many rounds as that takes."""
    target, draft = models
    result: dict[Text, float] = {}
    waiting: dict[Text, float] = {(): 1.0}
    while waiting:
        prefix, chance = waiting.popitem()
        if len(prefix) >= tokens or prefix[-1:] == (END,):
            result[prefix[:tokens]] = result.get(prefix[:tokens], 0.0) + chance
            continue
        constraint = behind(pattern, prefix)
        verified: defaultdict[Text, float] = defaultdict(float)
        for guess in itertools.product(range(SYMBOLS), repeat=n):
            drafted = np.prod([draft(prefix + guess[:i])[guess[i]] for i in range(n)])
            verified[guess[: cut(constraint, guess)]] += chance * drafted
        for size in {len(x) for x in verified}:
            drafts = [x for x in verified if len(x) == size]
            laws = np.array([[target(prefix + x[:i]) for i in range(size + 1)] for x in drafts])
            p = restricted(laws, constraint, drafts)
            q = np.array([[draft(prefix + x[:i]) for i in range(size)] for x in drafts])
            rules = rule(p, q, np.array(drafts)) if size else (np.ones((1, 1)), p)
            for x, lengths, after in zip(drafts, *rules, strict=True):
                for length, symbol in itertools.product(range(size + 1), range(SYMBOLS)):
                    text = (*x[:length], symbol)
                    if END in text:
                        text = text[: text.index(END) + 1]
                    more = verified[x] * lengths[length] * after[length, symbol]
                    if more > 0:
                        waiting[prefix + text] = waiting.get(prefix + text, 0.0) + more
    return result


def plain(pattern: str, target: Model, tokens: int) -> dict[Text, float]:
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(tokens):
        longer: dict[Text, float] = {}
        for text, chance in texts.items():
            if text[-1:] == (END,):
                longer[text] = chance
                continue
            row = restricted(target(text)[None, None], behind(pattern, text), [()])[0, 0]
            longer |= {(*text, s): chance * row[s] for s in range(SYMBOLS) if row[s] > 0}
        texts = longer
    return texts


def total_variation(one: dict[Text, float], two: dict[Text, float]) -> float:
    return sum(abs(one.get(key, 0.0) - two.get(key, 0.0)) for key in {*one, *two}) / 2


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rule", [token_lengths, block_lengths])
@pytest.mark.parametrize(
    ("n", "tokens"), [(1, 3), (2, 3), pytest.param(3, 3, marks=pytest.mark.slow)]
)
def test_the_joint_law_is_the_constrained_targets(
    pattern: str, rule: Kept, n: int, tokens: int
) -> None:
    models = toy(1), toy(2)
    expected = plain(pattern, models[0], tokens)
    assert len(expected) > 1 and abs(sum(expected.values()) - 1) < 1e-9
    assert total_variation(emitted(pattern, models, rule, n, tokens), expected) < 1e-9


def test_a_draft_of_certain_tokens_changes_nothing() -> None:
    """As lookup and forced tokens are: all probability on one token."""
    for guess in range(SYMBOLS):

        def sure(prefix: Text, guess: int = guess) -> np.ndarray:
            return np.eye(SYMBOLS)[guess]

        for pattern, rule in itertools.product(PATTERNS, (token_lengths, block_lengths)):
            expected = plain(pattern, toy(1), 2)
            law_of = emitted(pattern, (toy(1), sure), rule, 2, 2)
            assert total_variation(law_of, expected) < 1e-9


@pytest.mark.parametrize("rule", [token_lengths, block_lengths])
def test_the_enumeration_notices_a_drawn_token_that_is_dropped(rule: Kept) -> None:
    models = toy(1), toy(2)
    expected = plain(PATTERNS[1], models[0], 2)
    wrong = emitted(PATTERNS[1], models, rule, 2, 2, without_the_forbidden)
    assert total_variation(wrong, expected) > 1e-2


@pytest.mark.parametrize(("n", "tokens"), [(1, 3), (2, 3)])
def test_the_coupled_rule_is_exact_for_masked_rows(n: int, tokens: int) -> None:
    """In Fractions; behind a token that cannot come, a row is whatever the model says."""
    pieces = ("a", "b", "ab")

    @functools.cache
    def target(prefix: Text) -> Law:
        constraint = alphabet(pieces).constraint(regex("(b?a)*b?"), [])
        free = fractions(3)(prefix)
        if constraint.take(prefix) < len(prefix):
            return free
        [allowed] = constraint.masks([])
        weights = [p if allowed[id] else Fraction(0) for id, p in enumerate(free)]
        scale = math.lcm(*(weight.denominator for weight in weights))
        return law(*(int(weight * scale) for weight in weights))

    assert target((1,))[1] == 0
    total, accepted = distance(target, fractions(103), n, tokens)
    assert total == 0
    assert 0 < accepted < n
