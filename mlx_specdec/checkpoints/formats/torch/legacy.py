"""The stream that torch.save wrote before 1.6: five pickles, then the storages one after another,
each behind its number of elements, little-endian on any machine."""

from __future__ import annotations

from typing import Any

from ..reader import Malformed
from .objects import ADMITTED, Names, Storage, storage
from .unpickle import Buffer, load
from .zip import Span

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_BROKEN = "is truncated or damaged: download it again"


def read(data: Buffer) -> tuple[Any, dict[str, Span]]:
    """What was saved, and where each storage lies, by key. Raises Malformed."""
    magic, at = load(data, 0, Names(), storage)
    if magic != MAGIC:
        raise Malformed("is a pickle, but none that torch.save wrote")
    protocol, at = load(data, at, Names(), storage)
    if protocol != PROTOCOL:
        raise Malformed("is written by an unknown version of torch.save")
    _, at = load(data, at, Names(), storage)
    storages: dict[str, Storage] = {}

    def remember(identity: Any) -> Storage:
        place = storage(identity)
        if storages.setdefault(place.key, place) != place:
            raise Malformed("is damaged: it describes one storage in two ways")
        return place

    value, at = load(data, at, ADMITTED, remember)
    order, at = load(data, at, Names(), storage)
    if type(order) is not list or any(type(key) is not str for key in order):
        raise Malformed(_BROKEN)
    if len({*order}) < len(order) or not storages.keys() >= {*order}:
        raise Malformed("is damaged: its list of storages does not fit its tensors")
    spans: dict[str, Span] = {}
    for key in order:
        place = storages[key]
        if int.from_bytes(data[at : at + 8], "little") != place.count:
            raise Malformed(_BROKEN)
        spans[key] = Span(at + 8, place.nbytes)
        at += 8 + place.nbytes
        if at > len(data):
            raise Malformed(_BROKEN)
    return value, spans
