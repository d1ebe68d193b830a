"""Responses that clients can continue or fetch by their ids, in memory and within a bound."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .body import Body
from .problems import Problem

STORED_BYTES = 64 << 20
"""Bound of all stored responses, as JSON."""


@dataclass(frozen=True)
class Conversation:
    """A response, with all items of its conversation up to its output. nbytes: of both as JSON."""

    response: dict[str, Any]
    items: Sequence[Body]
    nbytes: int


NO_CONVERSATION = Conversation({}, (), 0)


class StoredResponses:
    """Responses by their ids, the oldest of which go first; used by several threads. Each counts
    all items of its conversation, although those that continue one another share them."""

    def __init__(self, most_bytes: int = STORED_BYTES) -> None:
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, Conversation] = OrderedDict()

    def put(self, response: dict[str, Any], before: Conversation, given: Sequence[Body]) -> None:
        """Store a response. before: what it continues. given: its input."""
        output = response["output"]
        nbytes = before.nbytes + len(json.dumps([response, given, output]))
        items = [*before.items, *given, *output]
        with self._lock:
            self._stored[response["id"]] = Conversation(response, items, nbytes)
            self.nbytes += nbytes
            while self.nbytes > self._most_bytes:
                self.nbytes -= self._stored.popitem(last=False)[1].nbytes

    def get(self, id: str) -> Conversation:
        """Return a stored response. Raises Problem where there is none."""
        with self._lock:
            if id in self._stored:
                return self._stored[id]
        raise _missing(id)

    def delete(self, id: str) -> None:
        """Delete a response; those that continue it stay. Raises Problem where there is none."""
        with self._lock:
            found = self._stored.pop(id, None)
            self.nbytes -= 0 if found is None else found.nbytes
        if found is None:
            raise _missing(id)


def _missing(id: str) -> Problem:
    return Problem(
        404,
        f"there is no response {id:.80}: it was not stored, was deleted, or gave way to newer ones",
        param="previous_response_id",
        code="previous_response_not_found",
    )
