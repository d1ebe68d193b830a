"""What a draft has yet to read before it can be made, and what reading takes."""

from __future__ import annotations

from collections.abc import Sequence


class Unread:
    """Whether something is unread, and the seconds of rounds that had to read something first.

    free: nothing has to be read for a draft. reading: plain steps that earlier texts took to read a
    prompt for their first drafts.
    """

    def __init__(self, free: bool, reading: float) -> None:
        self._free = free
        self._earlier = reading
        self._first: tuple[int, float] | None = None
        self._newest: tuple[int, float] | None = None
        self.any = not free

    def skip(self) -> None:
        """A round went by for which nothing was read."""
        self.any = not self._free

    def read(self, drafted: int, seconds: float) -> None:
        """A round with so many drafted tokens has read it."""
        self._newest = (drafted, seconds)
        self._first = self._first or self._newest
        self.any = False

    @property
    def measured(self) -> bool:
        """Whether this text knows what reading takes."""
        return self._first is not None

    def price(self, totals: Sequence[float], plain: float) -> float:
        """Seconds that the next draft takes longer. totals: of rounds in seconds, by drafted
        length; plain: of a plain step."""
        if not self.any:
            return 0.0
        return _beyond(self._newest, totals) if self._newest else self._earlier * plain

    def prompt(self, totals: Sequence[float], plain: float) -> float:
        """Plain steps that reading this text's prompt took; earlier ones' where it was read along
        with the target, or not at all."""
        return _beyond(self._first, totals) / plain if self._first and plain else self._earlier


def _beyond(round: tuple[int, float], totals: Sequence[float]) -> float:
    drafted, seconds = round
    return max(0.0, seconds - totals[drafted])
