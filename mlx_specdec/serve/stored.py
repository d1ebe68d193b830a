"""Responses that clients can continue or fetch by their ids, in memory and within a bound."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .bodies import Body
from .problems import Problem

STORED_BYTES = 64 << 20
"""Bound of all stored responses, as JSON."""


@dataclass(frozen=True)
class Conversation:
    """A response, with all items of its conversation up to its output. tenant: whose it is.
    nbytes: of response and items as JSON."""

    response: dict[str, Any] = field(default_factory=dict)
    items: Sequence[Body] = ()
    tenant: str = ""
    nbytes: int = 0


class StoredResponses:
    """Responses by their ids, the oldest of which go first; used by several threads. Each counts
    all items of its conversation, although those that continue one another share them."""

    def __init__(self, most_bytes: int = STORED_BYTES) -> None:
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, Conversation] = OrderedDict()

    def put(
        self, response: dict[str, Any], before: Conversation, added: Sequence[Body], tenant: str
    ) -> None:
        """Store a tenant's response. before: what it continues. given: its input."""
        output = response["output"]
        nbytes = before.nbytes + len(json.dumps([response, added, output]))
        items = [*before.items, *added, *output]
        with self._lock:
            self._stored[response["id"]] = Conversation(response, items, tenant, nbytes)
            self.nbytes += nbytes
            while self.nbytes > self._most_bytes:
                self.nbytes -= self._stored.popitem(last=False)[1].nbytes

    def get(self, id: str, tenant: str, *, delete: bool = False) -> Conversation:
        """Return a tenant's response, which `delete` removes; those that continue it stay. Raises
        Problem where there is none."""
        with self._lock:
            found = self._stored.get(id)
            if found is not None and found.tenant == tenant:
                if delete:
                    self.nbytes -= self._stored.pop(id).nbytes
                return found
        message = f"there is no response {id:.80}: it was not stored, was deleted, or is too old"
        code = "previous_response_not_found"
        raise Problem(404, message, param="previous_response_id", code=code)
