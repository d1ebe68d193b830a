"""The share of the device that decoding keeps while prompts are prefilled."""

import math
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

DECODING = 1 / 3
"""The share of the time that decoding gets while prompts are prefilled."""
CHUNK_SECONDS, SHORTEST_CHUNK, RECENT = 2.0, 32, 60.0
"""If anything was decoded in the last RECENT seconds, a chunk may take CHUNK_SECONDS, because the
next request may wait for its end. It has at least SHORTEST_CHUNK tokens. Each token takes longer
the more tokens come before it."""


class Turns:
    """Decides when the next chunk of a prompt is prefilled, and its length. Schedulers that share a
    device share one object: while any of them decodes, each chunk is followed by a pause.

    Args:
        clock: Returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._decoding: WeakSet[object] = WeakSet()
        self._due, self._decoded = 0.0, -math.inf

    def decodes(self, scheduler: object, does: bool) -> None:
        """Record whether a scheduler has rows to decode."""
        with self._changed:
            if scheduler in self._decoding:
                self._decoded = self._clock()
            (self._decoding.add if does else self._decoding.discard)(scheduler)
            self._changed.notify_all()

    def prefilled(self, seconds: float) -> None:
        """Record the seconds that a chunk took."""
        self._due = self._clock() + seconds * DECODING / (1 - DECODING)

    def most_tokens(self, pace: float) -> int | None:
        """Return the most tokens of the next chunk, None if there is no limit. pace: See
        `Group`."""
        if not pace or self._clock() - self._decoded > RECENT:
            return None
        return max(SHORTEST_CHUNK, int(CHUNK_SECONDS * pace))

    def may_prefill(self, *, wait: bool) -> bool:
        """Return whether a chunk may be prefilled now. wait: Whether the caller has nothing else to
        do, so that it waits until this is so."""
        with self._changed:
            while self._decoding and (left := self._due - self._clock()) > 0:
                if not wait:
                    return False
                self._changed.wait(left)
            return True
