"""The acceptance rules in exact fractions, and the law of what a round emits under them.

Nothing here knows the package. A round is exact if what it emits, continued by the target alone to
n + 1 tokens, has the target's law: by induction, any number of rounds then has it too."""

import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

SYMBOLS = 3
OUTSIDE, PADDING = SYMBOLS, (1 << 31) - 1
"""Ids that no vocabulary of three symbols has. The second one fills up a shorter proposal."""

Law = tuple[Fraction, ...]
Text = tuple[int, ...]
Model = Callable[[Text], Law]
"""The law of the token after a text."""
ZERO: Law = (Fraction(0),) * SYMBOLS


def law(*weights: int | Fraction) -> Law:
    return tuple(Fraction(weight) / sum(weights) for weight in weights)


def toy(seed: int, near: Model | None = None) -> Model:
    """Return a model whose laws depend on the whole text and have zeros. Some laws are those of
    the model `near`."""

    @functools.cache
    def model(text: Text) -> Law:
        generator = random.Random(repr((seed, text)))
        weights = [generator.choice((0, 1, 2, 3, 5, 8)) for _ in range(SYMBOLS)]
        weights[generator.randrange(SYMBOLS)] += 1
        return near(text) if near is not None and generator.random() < 0.2 else law(*weights)

    return model


@dataclass(frozen=True)
class Case:
    """What a rule is given about one sequence.

    Attributes:
        p: The target's laws, one per draft token and one after them.
        x: The draft tokens.
        q: The law of each draft token; a row that is no distribution is ZERO. None for tokens that
            were not drawn at random."""

    p: tuple[Law, ...]
    x: Text
    q: tuple[Law, ...] | None

    def rows(self) -> tuple[Law, ...]:
        """Return q, one-hot for tokens that were not drawn."""
        if self.q is not None:
            return self.q
        size = len(self.p[0])
        return tuple(tuple(Fraction(id == token) for id in range(size)) for token in self.x)

    def ratio(self, place: int) -> Fraction:
        """Return p(x) / q(x) of a draft token, or 0 if p(x) or q(x) is 0."""
        token, q = self.x[place], self.rows()[place]
        possible = token < len(q) and q[token] > 0
        return self.p[place][token] / q[token] if possible else Fraction(0)


@dataclass(frozen=True)
class Decision:
    """How a rule decides about a case.

    Attributes:
        chances: The probability that the test of each draft token succeeds.
        after: The law of the next token, after each number of accepted tokens.
        masses: The mass of each of these laws before it was normalized.
        longest: Whether the last successful test counts, and not the tests up to the first
            failure."""

    chances: tuple[Fraction, ...]
    after: tuple[Law, ...]
    masses: tuple[Fraction, ...]
    longest: bool = False

    def length(self, passed: Sequence[bool]) -> int:
        """Return the number of accepted tokens."""
        if self.longest:
            return max((place + 1 for place, yes in enumerate(passed) if yes), default=0)
        return next((place for place, yes in enumerate(passed) if not yes), len(passed))

    def lengths(self) -> list[Fraction]:
        """Return the probability of each number of accepted tokens."""
        result = [Fraction(0)] * (len(self.chances) + 1)
        possible = [[yes for yes in (True, False) if h != 1 - yes] for h in self.chances]
        for passed in itertools.product(*possible):
            pairs = zip(self.chances, passed, strict=True)
            result[self.length(passed)] += math.prod(h if yes else 1 - h for h, yes in pairs)
        return result

    def emitted(self, x: Text) -> Iterator[tuple[Text, Fraction]]:
        """Yield what the round may emit, with its probability."""
        for count, chance in enumerate(self.lengths()):
            for token, share in enumerate(self.after[count]):
                if chance * share:
                    yield (*x[:count], token), chance * share


def corrected(case: Case, chances: Iterable[Fraction], ratios: Sequence[Fraction], longest: bool):
    """Return the decision of a rule whose correction has the law of max(r p - q, 0)."""
    after, masses = [], []
    for r, p, q in zip(ratios, case.p, case.rows(), strict=False):
        residual = [max(r * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
        masses.append(sum(residual, Fraction(0)))
        after.append(law(*residual) if masses[-1] else p)
    bonus = len(case.x)
    return Decision(
        tuple(chances), (*after, case.p[bonus]), (*masses, Fraction(1)), longest=longest
    )


def token(case: Case, delta: Fraction = Fraction(0)) -> Decision:
    """Speculative sampling with lenience: accept with probability min(1, p / q + delta)."""
    places = range(len(case.x))
    ratios = [case.ratio(place) for place in places]
    chances = (min(Fraction(1), ratio + delta) if ratio else Fraction(0) for ratio in ratios)
    return corrected(case, chances, [Fraction(1)] * len(places), longest=False)


def block(case: Case, delta: Fraction = Fraction(0)) -> Decision:
    """Block verification; see arXiv 2403.10444."""
    n, q, ratios = len(case.x), case.rows(), [Fraction(1)]
    for place in range(n):
        ratios.append(min(Fraction(1), ratios[-1] * case.ratio(place)))
    chances = []
    for count in range(1, n):
        pairs = zip(case.p[count], q[count], strict=True)
        excess = sum(max(ratios[count] * a - b, Fraction(0)) for a, b in pairs)
        total = excess + 1 - ratios[count]
        chances.append(excess / total if total else Fraction(1))
    return corrected(case, [*chances, *ratios[n:][: n > 0]], ratios[:n], longest=True)


def typical(case: Case, epsilon: Fraction, alpha: Fraction) -> Decision:
    """Typical acceptance: accept x iff p(x) > min(epsilon, alpha exp(-H(p)))."""
    chances = []
    for p, x in zip(case.p, case.x, strict=False):
        p_x = p[x] if x < len(p) else Fraction(0)
        # exp(-H) is the product of p ** p, so its power with the common denominator is rational.
        power = math.lcm(*(share.denominator for share in p))
        exponential = math.prod(share ** int(share * power) for share in p)
        typical = p_x > epsilon or (p_x / alpha) ** power > exponential
        chances.append(Fraction(typical))
    return Decision(tuple(chances), case.p, (Fraction(1),) * len(case.p))


Draft = list[tuple[Fraction, Case]]
"""Everything that may be drafted in a round: cases and their probabilities."""


def rows_of(target: Model, x: Text) -> tuple[Law, ...]:
    return tuple(target(x[:place]) for place in range(len(x) + 1))


def drawn(
    target: Model,
    draft: Model,
    n: int,
    short: Callable[[Text], int] | None = None,
    broken: tuple[int, int] | None = None,
) -> Draft:
    """Return the round of a proposer that draws n tokens from its laws.

    Args:
        short: The number of tokens after which a draft ends; the rest of it is padding.
        broken: A place, and the token there, whose row is no distribution."""
    result: defaultdict[Case, Fraction] = defaultdict(Fraction)
    symbols = [range(SYMBOLS)] * n
    if broken is not None:
        symbols[broken[0]] = range(broken[1], broken[1] + 1)
    for x in itertools.product(*symbols):
        q = [
            ZERO if broken is not None and place == broken[0] else draft(x[:place])
            for place in range(n)
        ]
        chance = math.prod(row[x[place]] for place, row in enumerate(q) if row is not ZERO)
        count = n if short is None else short(x)
        cut = (*x[:count], *[PADDING] * (n - count))
        case = Case(rows_of(target, cut), cut, (*q[:count], *[ZERO] * (n - count)))
        result[case] += chance
    return [(chance, case) for case, chance in result.items()]


def drafts(seed: int, n: int) -> Iterator[Draft]:
    """Yield rounds of all kinds of proposals of n tokens."""
    target = toy(seed)
    draft = toy(seed + 100, target)
    yield drawn(target, draft, n)
    # Tokens that were not drawn, some of them outside of the vocabulary or padding.
    for x in itertools.product((*range(SYMBOLS), OUTSIDE, PADDING), repeat=n):
        yield [(Fraction(1), Case(rows_of(target, x), x, None))]
    if n > 1:
        # A draft ends after a token 0, or after its first token. Padding fills up the rectangle.
        yield drawn(target, draft, n, lambda x: x.index(0) + 1 if 0 in x else n)
        yield drawn(target, draft, n, lambda x: 1)
    for broken in itertools.product(range(n), (*range(SYMBOLS), OUTSIDE)):
        yield drawn(target, draft, n, broken=broken)


def distance(
    target: Model, draft: Draft, rule: Callable[[Case], Decision], end: int | None = None
) -> Fraction:
    """Return the total variation between the target's law of n + 1 tokens and the law of a round
    that the target continues alone.

    Args:
        end: The token that ends a text, which the target then continues with this token alone."""
    n = max(len(case.x) for _, case in draft)
    emitted: defaultdict[Text, Fraction] = defaultdict(Fraction)
    for chance, case in draft:
        for text, share in rule(case).emitted(case.x) if chance else ():
            emitted[text[: text.index(end) + 1] if end in text else text] += chance * share
    # Text -> its probability under the round, and under the target.
    level = {(): (Fraction(0), Fraction(1))}
    for _ in range(n + 1):
        level = {
            (*text, token): (found * p + emitted[*text, token], right * p)
            for text, (found, right) in level.items()
            for token, p in enumerate(target(text) if found or right else ())
        }
    return sum((abs(found - right) for found, right in level.values()), Fraction(0)) / 2


def accepted(draft: Draft, rule: Callable[[Case], Decision]) -> Fraction:
    """Return the mean number of accepted tokens."""
    return sum(
        (
            chance * count * share
            for chance, case in draft
            for count, share in enumerate(rule(case).lengths())
        ),
        Fraction(0),
    )
