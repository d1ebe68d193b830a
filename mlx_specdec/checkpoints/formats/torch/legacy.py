"""The stream that torch.save wrote before 1.6: five pickles, then the storages one after another.

Knows that order and how long each storage is. Storages are little-endian on any machine. Knows
nothing of what tensors mean; no storage is read here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .objects import ADMITTED, Storage
from .pickle_machine import Buffer, Refused
from .unpickle import load
from .zip import Span

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_BROKEN = "is truncated or damaged: download it again"


def read(data: Buffer, persistent: Callable[[Any], Storage]) -> tuple[Any, dict[str, Span]]:
    """What was saved, and where each storage lies, by key. Raises Refused."""
    magic, at = load(data, 0, {}, _nothing)
    if magic != MAGIC:
        raise Refused("is a pickle, but none that torch.save wrote")
    protocol, at = load(data, at, {}, _nothing)
    if protocol != PROTOCOL:
        raise Refused("is written by an unknown version of torch.save")
    _, at = load(data, at, {}, _nothing)
    storages: dict[str, Storage] = {}

    def remember(identity: Any) -> Storage:
        found = persistent(identity)
        known = storages.setdefault(found.key, found)
        if known != found:
            raise Refused("is damaged: it describes one storage in two ways")
        return found

    value, at = load(data, at, ADMITTED, remember)
    order, at = load(data, at, {}, _nothing)
    if type(order) is not list:
        raise Refused(_BROKEN)
    return value, _spans(data, at, order, storages)


def _spans(
    data: Buffer, at: int, order: list[Any], storages: dict[str, Storage]
) -> dict[str, Span]:
    spans: dict[str, Span] = {}
    for key in order:
        storage = storages.get(key) if type(key) is str else None
        if storage is None or key in spans:
            raise Refused("is damaged: its list of storages does not fit its tensors")
        if int.from_bytes(data[at : at + 8], "little") != storage.count:
            raise Refused(_BROKEN)
        spans[key] = Span(at + 8, storage.nbytes)
        at += 8 + storage.nbytes
        if at > len(data):
            raise Refused(_BROKEN)
    return spans


def _nothing(identity: Any) -> Any:
    raise Refused("is damaged: its pickle refers to what is no storage")
