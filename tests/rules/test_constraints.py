"""Rounds in which a grammar binds the target: what is emitted has the law of plain decoding, p
without the tokens that the grammar forbids, whatever is drafted.

Masks and cuts are the shipped ones. The law of plain decoding asks a constraint that no draft has
ever touched."""

import functools
import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest

from mlx_specdec.core.constraint import Constraint

from ..support.letters import alphabet, regex
from . import reference
from .reference import Case, Decision, Law, Model, Text, law

PIECES = ("<end>", "a", "b", "ab")
END, IDS = 0, range(len(PIECES))
PATTERNS = ["[ab]+", "(ab|b)*a", "a(b|ab)*", "b?a{1,2}b?"]
Cut = Callable[[Constraint, Text], int]


def after(pattern: str, text: Text) -> Constraint:
    constraint = alphabet(PIECES).constraint(regex(pattern), [END])
    assert constraint.take(text) == len(text)
    return constraint


def free(seed: int) -> Model:
    """Return a model of four symbols without zeros."""
    return functools.cache(lambda text: law(*(1 + w * 7 for w in reference.toy(seed)(text)), 1))


def restricted(p: Law, allowed: object) -> Law:
    return law(*(share if yes else Fraction(0) for share, yes in zip(p, allowed, strict=True)))


def verifiable(constraint: Constraint, drafted: Text) -> int:
    return constraint.verifiable(drafted)


def without_the_forbidden(constraint: Constraint, drafted: Text) -> int:
    """Drop the token that cannot come as well, although it was drawn: a fault."""
    count = constraint.verifiable(drafted)
    return count - (not constraint.masks(drafted)[count - 1, drafted[count - 1]])


def rounds(
    pattern: str, text: Text, draft: Model, n: int, cut: Cut = verifiable
) -> list[tuple[Fraction, Case]]:
    """Return what may be drafted after a text, with the target's laws under the grammar."""
    result: dict[Case, Fraction] = {}
    constraint = after(pattern, text)
    for x in itertools.product(IDS, repeat=n):
        q = [draft(text + x[:place]) for place in range(n)]
        chance = functools.reduce(Fraction.__mul__, (q[i][x[i]] for i in range(n)))
        x = x[: cut(constraint, x)]
        masks = constraint.masks(x)
        p = [restricted(free(1)(text + x[:place]), mask) for place, mask in enumerate(masks)]
        case = Case(tuple(p), x, tuple(q[: len(x)]))
        result[case] = result.get(case, Fraction(0)) + chance
    return [(chance, case) for case, chance in result.items()]


def distance(
    pattern: str, text: Text, draft: list[tuple[Fraction, Case]], rule: Callable[[Case], Decision]
) -> Fraction:
    """Return the distance of a round after a text from plain decoding."""

    @functools.cache
    def plain(tokens: Text) -> Law:
        if END in tokens:
            return law(1, 0, 0, 0)
        return restricted(free(1)(text + tokens), after(pattern, text + tokens).masks([])[0])

    return reference.distance(plain, draft, rule, END)


RULES = [reference.token, reference.block]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_has_the_law_of_plain_decoding(
    pattern: str, rule: Callable[[Case], Decision]
) -> None:
    sure = [lambda text, token=token: law(*(id == token for id in IDS)) for token in IDS]
    for n, text, draft in (
        *((n, (), free(2)) for n in (1, 2, 3)),
        *((2, (token,), free(2)) for token in (1, 2, 3)),
        *((2, (), draft) for draft in sure),
    ):
        if after(pattern, ()).take(text) == len(text):
            assert distance(pattern, text, rounds(pattern, text, draft, n), rule) == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_drawn_token_that_is_dropped_is_noticed(rule: Callable[[Case], Decision]) -> None:
    wrong = rounds(PATTERNS[1], (), free(2), 2, without_the_forbidden)
    assert distance(PATTERNS[1], (), wrong, rule) > Fraction(1, 100)
