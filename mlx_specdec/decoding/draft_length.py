"""How many tokens to draft in the next round, zero included.

Knows counts, seconds and room. Knows nothing of who drafts, and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import OptionError
from .cost_model import Acceptance, RoundCosts


class DraftLength(Protocol):
    """Chooses the number of drafted tokens; 0 means a plain decoding step."""

    def choose(self, room: int) -> int:
        """At most room - 1 tokens, so that a bonus token never overruns.

        room: how many tokens may still be emitted, at least 1.
        """
        ...

    def observe(
        self, drafted: int, accepted: int, seconds: float, draft: float | None = None
    ) -> None:
        """What the last round was; drafted 0 is a pipelined plain step.

        seconds: of the whole round. draft: of drafting, where the round was timed in parts.
        """
        ...


@dataclass(frozen=True)
class FixedLength:
    """The same number in every round; 0 is plain decoding.

    Raises OptionError for a negative number.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise OptionError(f"num-draft must be 0 or more, not {self.count}")

    def choose(self, room: int) -> int:
        """`count`, or less where the text is about to end."""
        return max(0, min(self.count, room - 1))

    def observe(
        self, drafted: int, accepted: int, seconds: float, draft: float | None = None
    ) -> None:
        """Nothing is learned."""


class AutoLength:
    """The number that promises most tokens per second, from costs and acceptance seen so far.

    Starts with a few plain steps and two rounds of FIRST tokens. While plain decoding is best it
    drafts nothing, but for a probe after a stretch long enough that the probe's expected loss stays
    within PROBE_BUDGET of the time; the draft's catch-up over that stretch is part of the loss.
    """

    MOST = 16
    FIRST = 3
    PLAIN_FIRST = 4
    SPECULATIVE_FIRST = 2
    BETTER = 1.03
    PROBE_BUDGET = 0.01
    PROBE_AFTER = 32

    def __init__(self) -> None:
        self._costs = RoundCosts(self.MOST)
        self._acceptance = Acceptance(self.MOST)
        self._plain = 0
        self._speculative = 0
        self._current = self.FIRST
        self._parked_for = 0
        self._catch_up = 0.0
        self._probe = 1
        self._probe_after = self.PROBE_AFTER

    def choose(self, room: int) -> int:
        """The current choice, cut where the text is about to end."""
        return max(0, min(self._wanted(), room - 1))

    def observe(
        self, drafted: int, accepted: int, seconds: float, draft: float | None = None
    ) -> None:
        """Learn from a round, and choose again."""
        if drafted == 0:
            self._observe_plain(seconds)
            return
        self._acceptance.add(drafted, accepted)
        self._speculative += 1
        expected = self._costs.totals()[min(drafted, self.MOST)] if self._plain > 1 else seconds
        if self._parked_for and self._speculative > 1:
            # This round also paid for what the draft had not read yet.
            self._catch_up = max(0.0, seconds - expected)
        elif drafted <= self.MOST:
            self._costs.add(drafted, seconds, draft)
        self._parked_for = 0
        self._decide()

    def _observe_plain(self, seconds: float) -> None:
        self._parked_for += 1
        self._plain += 1
        # The first step of a stretch fills the pipeline and costs more than a step.
        if self._parked_for > 1 or self._plain == 1:
            self._costs.add(0, seconds, None)

    def _wanted(self) -> int:
        if self._plain < self.PLAIN_FIRST:
            return 0
        if self._speculative < self.SPECULATIVE_FIRST:
            return self.FIRST
        if self._current == 0 and self._parked_for >= self._probe_after:
            return self._probe
        return self._current

    def _decide(self) -> None:
        if self._speculative < self.SPECULATIVE_FIRST:
            return
        emitted, totals = self._acceptance.emitted(), self._costs.totals()
        rates = [tokens / max(cost, 1e-9) for tokens, cost in zip(emitted, totals, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] > self.BETTER * rates[self._current] or (
            best == 0 and rates[0] > rates[self._current]
        ):
            self._current = best
        if self._current == 0:
            self._park(emitted, totals)

    def _park(self, emitted: Sequence[float], costs: Sequence[float]) -> None:
        plain = costs[0]
        losses = [costs[n] - emitted[n] * plain for n in range(1, self.MOST + 1)]
        self._probe = 1 + min(range(len(losses)), key=losses.__getitem__)
        loss = max(0.0, losses[self._probe - 1]) + self._catch_up
        steps = math.ceil(loss / (self.PROBE_BUDGET * plain)) if plain > 0 else 0
        self._probe_after = max(self.PROBE_AFTER, steps)
