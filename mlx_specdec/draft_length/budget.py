"""What trials may cost: all that is tried for the sake of learning is paid out of one budget."""

from __future__ import annotations


class Budget:
    """Seconds that rounds may lose by being worse than the best one known.

    A text begins with AT_START plain steps, or with what earlier texts left, and earns PER_TEXT in
    its first SHORT plain steps, so that short texts save for one another, and SHARE of all its
    time. saved: what earlier ones left, in plain steps; None where there were none. part: of all
    this, where several learn beside one another.
    """

    AT_START = 1.5
    PER_TEXT = 0.25
    SHORT = 12
    SHARE = 0.008
    MOST_SAVED = 3.0
    MOST_OWED = 3.0
    """What a text lost beyond its budget is earned back by others, and what reading its prompt took
    as well, up to MOST_OWED_FOR_READING: more was noise, which is nobody's debt."""
    MOST_OWED_FOR_READING = 5.0
    LEAST = 0.25
    """Share of the budget that is left to a pair of which everything seems to be known."""

    def __init__(self, saved: float | None = None, part: float = 1.0) -> None:
        self._steps = part * self.AT_START if saved is None else saved
        self._part = part
        self._elapsed = 0.0
        self._spent = 0.0

    def earn(self, seconds: float, settled: float = 0.0) -> None:
        """Rounds took so long. settled: how much is known of what they can teach, up to 1, which
        does not matter to a text that begins with debts."""
        share = 1.0 if self._steps < 0 else 1 - settled * (1 - self.LEAST)
        self._elapsed += share * seconds

    def spend(self, seconds: float) -> None:
        """A trial lost so much; less than nothing is no gain."""
        self._spent += max(0.0, seconds)

    def left(self, plain: float) -> float:
        """In seconds; plain: those of a plain step."""
        short = min(self.SHORT * plain, self._elapsed) * self.PER_TEXT / self.SHORT
        earned = self._part * (short + self.SHARE * self._elapsed)
        return self._steps * plain + earned - self._spent

    def saved(self, plain: float, reading: float = 0.0) -> float:
        """What is left for texts that are yet to come, in plain steps of `plain` seconds, 0 where
        none was seen; less than 0 where more was spent. reading: what reading a prompt takes, in
        plain steps."""
        steps = self.left(plain) / plain if plain else self._steps
        owed = self.MOST_OWED + min(reading, self.MOST_OWED_FOR_READING)
        return min(max(-owed, steps), self.MOST_SAVED)
