"""Responses that clients can continue or fetch by id. They are kept in memory, up to a size."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .problems import Problem

STORED_BYTES = 64 << 20
"""Largest size of all stored responses together, as JSON."""


@dataclass(frozen=True)
class StoredConversation:
    """A response and its conversation.

    Attributes:
        items: All items of the conversation, including the response's output.
        nbytes: Size of the response and the items as JSON.
    """

    response: dict[str, Any] = field(default_factory=dict)
    items: Sequence[Any] = ()
    tenant: str = ""
    nbytes: int = 0


class StoredResponses:
    """Responses by id. The oldest responses are dropped first. The size of a response includes its
    whole conversation, although responses of one conversation share items."""

    def __init__(self, most_bytes: int = STORED_BYTES) -> None:
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, StoredConversation] = OrderedDict()

    def put(
        self,
        response: dict[str, Any],
        before: StoredConversation,
        added: Sequence[Any],
        nbytes: int,
        tenant: str,
    ) -> None:
        """Store a response.

        Args:
            before: The conversation that the request continued.
            added: The items of the request's input and of the response.
            nbytes: Size of the input as JSON.
        """
        nbytes += before.nbytes + len(json.dumps([response, response["output"]]))
        items = [*before.items, *added]
        with self._lock:
            self._stored[response["id"]] = StoredConversation(response, items, tenant, nbytes)
            self.nbytes += nbytes
            while self.nbytes > self._most_bytes:
                self.nbytes -= self._stored.popitem(last=False)[1].nbytes

    def get(self, id: str, tenant: str, *, delete: bool = False) -> StoredConversation:
        """Return a response, and delete it if `delete` is set. Responses that continue it stay.
        Raises Problem if the tenant has no response with this id."""
        with self._lock:
            found = self._stored.get(id)
            if found is not None and found.tenant == tenant:
                if delete:
                    self.nbytes -= self._stored.pop(id).nbytes
                return found
        message = f"there is no response {id:.80}: it was not stored, was deleted, or is too old"
        code = "previous_response_not_found"
        raise Problem(404, message, param="previous_response_id", code=code)
