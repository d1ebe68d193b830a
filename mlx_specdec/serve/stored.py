"""Responses that clients can continue or fetch by id. They are kept in memory, up to a size."""

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
    nbytes: int = 0


class StoredResponses:
    """The stored responses of all tenants. The oldest responses are dropped first. The size of a
    response includes its whole conversation, although responses of one conversation share items.
    Only the thread of the event loop puts and deletes."""

    def __init__(self, most_bytes: int = STORED_BYTES) -> None:
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._stored: OrderedDict[tuple[str, str], StoredConversation] = OrderedDict()

    def put(self, tenant: str, stored: StoredConversation) -> None:
        """Store a response."""
        self._stored[tenant, stored.response["id"]] = stored
        self.nbytes += stored.nbytes
        while self.nbytes > self._most_bytes:
            self.nbytes -= self._stored.popitem(last=False)[1].nbytes

    def get(self, tenant: str, id: str, *, delete: bool = False) -> StoredConversation:
        """Return a response, and delete it if `delete` is set. Responses that continue it stay.
        Raises Problem if the tenant has no response with this id."""
        found = self._stored.get((tenant, id))
        if found is None:
            reason = "it was not stored, was deleted, or is too old"
            message = f"there is no response {id:.80}: {reason}"
            code = "previous_response_not_found"
            raise Problem(404, message, param="previous_response_id", code=code)
        if delete:
            self.nbytes -= self._stored.pop((tenant, id)).nbytes
        return found
