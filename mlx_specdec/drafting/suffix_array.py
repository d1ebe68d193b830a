"""The places of a text in the order of what begins there, for hundreds of millions of tokens.

Prefix doubling (Manber and Myers, 1990) that stops at a depth, group by group, so that beside text,
order and ranks (12 bytes a token) only one piece is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int32]
PIECE = 1 << 18
"""Places that are sorted at a time; a group of equal ones is never divided."""


def suffix_array(
    text: Integers, depth: int, report: Callable[[int, int], None] | None = None
) -> Integers:
    """All places of `text`, ordered by the `depth` numbers from there on; an end comes first.

    text: int32, none negative, shorter than 2 ** 31 - depth. The order among places that agree so
    far is any. report: called with (done, total) places. At most 40 bytes a number are in use,
    `text` and the result included; 12 and a constant unless single numbers repeat without end.
    """
    report = report or _ignore
    rounds = max(depth - 1, 0).bit_length()
    total = len(text) * (rounds + 1)
    report(0, total)
    places, ranks = _by_first(text, padding=depth)
    done, step = len(text), 1
    while step < depth:
        report(done, total)
        for begin, end in _pieces(places, ranks):
            _refine(places[begin:end], begin, ranks, step)
            report(done + end, total)
        done, step = done + len(text), 2 * step
    report(total, total)
    return places


def _by_first(text: Integers, padding: int) -> tuple[Integers, Integers]:
    """Places ordered by their first number, and each place's rank: where its group begins.

    Places beyond the end have rank -1, so many as `padding`.
    """
    size = int(text.max(initial=0)) + 1
    counts = np.zeros(size, np.int64)
    for begin in range(0, len(text), PIECE):
        counts += np.bincount(text[begin : begin + PIECE], minlength=size)
    starts = np.cumsum(counts) - counts
    places = np.empty(len(text), np.int32)
    ranks = np.full(len(text) + padding, -1, np.int32)
    filled = starts.copy()
    for begin in range(0, len(text), PIECE):
        piece = text[begin : begin + PIECE]
        order = np.argsort(piece, kind="stable")
        ordered = piece[order]
        here = np.bincount(piece, minlength=size)
        among = np.arange(len(piece)) - (np.cumsum(here) - here)[ordered]
        places[filled[ordered] + among] = order + begin
        ranks[begin : begin + len(piece)] = starts[piece]
        filled += here
    return places, ranks


def _pieces(places: Integers, ranks: Integers) -> Iterator[tuple[int, int]]:
    """Divide the places into stretches of whole groups, PIECE long unless a group is longer."""
    begin = 0
    while begin < len(places):
        end = begin + PIECE
        if end < len(places):
            start = int(ranks[places[end]])
            end = start if start > begin else _end_of_group(places, ranks, begin)
        yield begin, min(end, len(places))
        begin = end


def _end_of_group(places: Integers, ranks: Integers, begin: int) -> int:
    for at in range(begin + PIECE, len(places), PIECE):
        others = np.flatnonzero(ranks[places[at : at + PIECE]] != begin)
        if others.size:
            return at + int(others[0])
    return len(places)


def _refine(stretch: Integers, begin: int, ranks: Integers, step: int) -> None:
    """Order each group of a stretch by the ranks `step` further on; changes stretch and ranks.

    Ranks that another stretch, or this round, has made finer already are only nearer to the truth.
    """
    group = ranks[stretch]
    alone = np.ones(len(stretch) + 1, bool)
    np.not_equal(group[1:], group[:-1], out=alone[1:-1])
    several = np.flatnonzero(~(alone[1:] & alone[:-1])).astype(np.int32)
    del alone
    if not several.size:
        return
    whole = several.size == len(stretch)
    members = stretch if whole else stretch[several]
    keys = (group if whole else group[several]).astype(np.int64)
    del group
    keys <<= 32
    # Ranks begin at -1, beyond the end; as unsigned halves of a key they must not be negative.
    keys += ranks[members + np.int32(step)]
    keys += 1
    order = np.argsort(keys)
    if whole:
        stretch[:] = stretch[order]
        del several
    else:
        stretch[several] = members[order]
    keys = keys[order]
    del order, members
    new = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    del keys
    at = np.arange(len(stretch), dtype=np.int32) if whole else several
    at = np.where(new, at, np.int32(0))
    np.maximum.accumulate(at, out=at)
    at += np.int32(begin)
    ranks[stretch if whole else stretch[several]] = at


def _ignore(done: int, total: int) -> None:
    return None
