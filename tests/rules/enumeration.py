"""Shipped rules against the reference: both sides of every boundary at which a verdict changes.

A verdict is a function of the noise. For each case, the noise is put just before and just after
each boundary that the reference has: uniform numbers around each probability of acceptance, Gumbel
noise that lets one token barely win against another one. A rule that decides as the reference does
at all these places has the reference's law, but for `NEAR`."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import mlx.core as mx
import numpy as np

from mlx_specdec.types import Noise, Proposal, Rule

from .reference import SYMBOLS, ZERO, Case, Decision, Law

NEAR = 1e-3
"""Distance of uniform numbers from a probability of acceptance."""
CLOSE = 0.01
"""Distance between the Gumbel scores of the token that wins and of the one that barely loses."""
FLOOR = 1e-4
"""A token of probability 0 would win if its probability were larger than this."""
SOLID = Fraction(1, 1000)
"""Mass of a residual below which float32 does not tell its law."""
NO_LAW = ([-math.inf] * SYMBOLS, [math.nan, 0.0, 0.0], [math.inf, 0.0, 0.0])
"""Rows of a draft that are no distribution."""


class Given(Noise):
    """Noise of one round, each kind of which may be drawn once.

    Attributes:
        target, accept, correction: Arrays as `Noise` returns them; None for noise that the rule
            must not draw."""

    def __init__(self, **arrays: mx.array | None) -> None:
        self._arrays = arrays

    def target(self, count: int) -> mx.array | None:
        return self._once("target", count)

    def accept(self, count: int) -> mx.array | None:
        return self._once("accept", count)

    def correction(self) -> mx.array | None:
        return self._once("correction")

    def _once(self, kind: str, count: int | None = None) -> mx.array | None:
        assert kind in self._arrays, f"{kind} noise does not exist, or is drawn twice"
        array = self._arrays.pop(kind)
        assert array is None or count in (None, array.shape[1]), f"{count} rows of {kind} noise"
        return array


def logs(p: Sequence[Fraction], shift: float = 0.0) -> list[float]:
    return [math.log(share) + shift if share else -math.inf for share in p]


def barely(p: Law, winner: int, second: int) -> list[float]:
    """Return Gumbel noise with which one token wins, and another one nearly does."""
    scores = [-CLOSE if token == second else -5.0 for token in range(len(p))]
    scores[winner] = 0.0
    return [score - math.log(max(share, FLOOR)) for score, share in zip(scores, p, strict=True)]


@dataclass
class Probes:
    """Cases of one length, the noise of each probe of a case, and what must come of it.

    Attributes:
        case: The number of each probe's case.
        noise: The noise of each probe, by its kind.
        length, next: How many tokens must be accepted, and which token must follow."""

    cases: list[Case] = field(default_factory=list)
    case: list[int] = field(default_factory=list)
    noise: dict[str, list[list]] = field(default_factory=dict)
    length: list[int] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    def add(self, length: int, token: int, **noise: list) -> None:
        """Add a probe of the last case."""
        self.case.append(len(self.cases) - 1)
        self.length.append(length)
        self.next.append(token)
        for kind, values in noise.items():
            self.noise.setdefault(kind, []).append(values)

    def inputs(self) -> tuple[mx.array, Proposal]:
        """Return log p, up to a constant per row, and the proposals of all probes."""
        n = len(self.cases[0].x)
        shifts = [0.0, 0.7, -1.3, 2.1]
        log_p = [[logs(row, shifts[i]) for i, row in enumerate(case.p)] for case in self.cases]
        tokens = np.array([case.x for case in self.cases], np.int32).reshape(len(self.cases), n)
        rows = None
        if self.cases[0].q is not None and n:
            log_q = [
                [NO_LAW[number % 3] if q is ZERO else logs(q, shifts[-i - 1]) for i, q in pairs]
                for number, pairs in enumerate(enumerate(case.q or ()) for case in self.cases)
            ]
            rows = mx.array(np.array(log_q, np.float32)[self.case])
        log_p_rows = np.array(log_p, np.float32)[self.case]
        return mx.array(log_p_rows), Proposal(mx.array(tokens[self.case]), rows)

    def refusal(self, rule: Rule, delta: float = 0.0) -> str:
        """Return the first difference between a rule and the reference, or ""."""
        log_p, proposal = self.inputs()
        given = {kind: mx.array(np.array(rows, np.float32)) for kind, rows in self.noise.items()}
        try:
            verdict = rule(log_p, proposal, Given(**given or {"target": None}), delta)
        except AssertionError as problem:
            return str(problem)
        n, length = proposal.size, np.array(self.length)
        expected = np.arange(n) < length[:, None]
        found, token = np.array(verdict.accepted), np.array(verdict.next)
        assert found.shape == expected.shape and token.shape == length.shape
        wrong = (found != expected).any(axis=1) | (token != self.next)
        if not wrong.any():
            return ""
        first = int(np.argmax(wrong))
        return (
            f"{wrong.sum()} of {len(wrong)} verdicts, such as {found[first].tolist()} and "
            f"{token[first]} in place of {length[first]} and {self.next[first]} of "
            f"{self.cases[self.case[first]]} with "
            f"{ {kind: rows[first] for kind, rows in self.noise.items()} }"
        )


def uniforms(decision: Decision, case: Case) -> Iterator[tuple[float, ...]]:
    """Yield uniform numbers around each probability of acceptance."""
    around, possible = [], True
    for place, chance in enumerate(decision.chances):
        possible = possible and case.ratio(place) > 0
        below = [float(chance) - NEAR] if chance > NEAR else []
        above = [float(chance) + NEAR] if chance < 1 - NEAR else []
        if not chance:
            # What is impossible must not be accepted with the smallest number either.
            above = [NEAR if possible and decision.longest else 0.0]
        around.append(below + above)
    return itertools.product(*around)


def sampled(
    cases: Sequence[Case], decide: Callable[[Case], Decision], *, tests: bool = True
) -> Probes:
    """Return the probes of a rule that draws the correction token.

    Args:
        tests: Whether the rule draws uniform numbers for its tests."""
    probes = Probes()
    for case in cases:
        decision = decide(case)
        probes.cases.append(case)
        for numbers in uniforms(decision, case):
            passed = [u < h for u, h in zip(numbers, decision.chances, strict=True)]
            length = decision.length(passed)
            after, mass = decision.after[length], decision.masses[length]
            if mass < SOLID and (mass or (length and case.ratio(length - 1))):
                continue
            for winner, second in itertools.permutations(range(len(after)), 2):
                if after[winner] * mass >= SOLID or (not mass and after[winner]):
                    noise = {"correction": barely(after, winner, second)}
                    if tests and case.x:
                        noise["accept"] = list(numbers)
                    probes.add(length, winner, **noise)
    return probes


def chosen(
    cases: Sequence[Case], accepts: Callable[[Law, int, int], bool], *, greedy: bool = False
) -> Probes:
    """Return the probes of a rule by which the target's own tokens follow the accepted ones.

    Args:
        accepts: A function of p, of the target's own token and of the draft token. It returns
            whether the draft token is accepted.
        greedy: Whether there is no noise, so that the target's own tokens are the likeliest."""
    probes, generator = Probes(), random.Random(0)
    for case in cases:
        probes.cases.append(case)
        possible = [[id for id, share in enumerate(p) if share] for p in case.p]
        if greedy:
            possible = [[p.index(max(p))] for p in case.p]
        for own in itertools.product(*possible):
            passed = [accepts(*row) for row in zip(case.p, own, case.x, strict=False)]
            length = Decision((), (), ()).length(passed)
            noise = [
                barely(p, token, generator.choice([id for id in range(SYMBOLS) if id != token]))
                for p, token in zip(case.p, own, strict=True)
            ]
            probes.add(length, own[length], **({} if greedy else {"target": noise}))
    return probes


def same(p: Law, own: int, drafted: int) -> bool:
    """Coupled: the draft token is the target's own."""
    return own == drafted
