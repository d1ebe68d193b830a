"""A model whose passes cost what a test says, on a clock that nothing else moves."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_specdec.interfaces import Scores

STALL = 1000.0


class Clock:
    """Seconds that only passes move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PricedContext:
    """A context whose pass over m tokens takes fixed + m * per_row, and `begins` more after a
    rewind. It records its calls."""

    def __init__(self, clock: Clock, fixed: float, per_row: float) -> None:
        self._clock, self._fixed, self._per_row = clock, fixed, per_row
        self._seen = self.final = 0
        self.passes: list[tuple[int, int]] = []
        self.stalled: tuple[int, ...] = ()
        self.begins = 0.0
        self.rewinding = 77.0  # not measured
        self._begun = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._seen,)

    def evaluate(self) -> None:
        """Nothing is lazy here."""

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        rows = tokens.shape[1]
        self.passes.append((rows, proposed))
        self._seen += rows
        if proposed < rows:
            self.final = self._seen - proposed
        stall = STALL if len(self.passes) in self.stalled else 0.0
        begin = 0.0 if self._begun else self.begins
        self._begun = True
        self._clock.now += begin + self._fixed + rows * self._per_row + stall
        return Scores(mx.zeros((1, rows, 5)))

    def rewind(self, lengths: tuple[int, ...]) -> None:
        assert self.final <= lengths[0] <= self._seen
        self._seen = lengths[0]
        self._begun = False
        self._clock.now += self.rewinding


class PricedModel:
    """Opens one context."""

    vocabulary = 5

    def __init__(self, clock: Clock, fixed: float = 1.0, per_row: float = 0.25) -> None:
        self.context = PricedContext(clock, fixed, per_row)
        self.prompts: list[list[int]] = []

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def open(self, prompt: Sequence[int], cached: object = None) -> PricedContext:
        self.prompts.append(list(prompt))
        self.context._seen = 0
        return self.context
