"""Takes tokens back out of a model's mlx-lm caches: exactly, by replay, or not at all.

There are three kinds of cache, by their exact class:

    append   entries in order, nothing overwritten (KVCache, QuantizedKVCache): cut by counting
    window   RotatingKVCache: cut while what is left still fills the window in order
    opaque   all others, recurrent state first of all: copied before every pass that may be undone

`RotatingKVCache.trim` is never called: once the window has wrapped it forgets nothing useful and
says nothing. A copy is `copy.deepcopy`, which shares memory until either side is written to."""

import copy
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from ...errors import RewindError


@dataclass(frozen=True)
class Slot:
    """The place of one cache: the list through which models reach it, and where in it."""

    holder: list[Any]
    index: int

    @property
    def cache(self) -> Any:
        return self.holder[self.index]


@dataclass(frozen=True)
class _Boundary:
    """Copies, by slot number, of the caches that a pass was about to overwrite, at `length`."""

    length: int
    copies: dict[int, Any]


class RewindableCache:
    """One sequence's caches, one entry a layer as a model's `make_cache` gives them.

    entries: the list that passes of the model are given; its elements are replaced on a rewind.
        Must be empty caches, or ones whose offsets are already the same `length`.

    The caller calls `before_pass` ahead of every pass and `rewind` to undo. What must hold: a pass
    adds exactly `rows` tokens to every cache."""

    def __init__(self, entries: list[Any], length: int = 0) -> None:
        self.entries = entries
        self.length = length
        self._slots = slots(entries)
        kinds = [type(slot.cache) for slot in self._slots]
        self._append = [i for i, kind in enumerate(kinds) if kind in (KVCache, QuantizedKVCache)]
        self._window = [i for i, kind in enumerate(kinds) if kind is RotatingKVCache]
        known = {*self._append, *self._window}
        self._opaque = [i for i in range(len(kinds)) if i not in known]
        self._boundaries: list[_Boundary] = []

    @property
    def replays(self) -> bool:
        """Whether undoing part of a pass of several tokens costs a replay of the accepted ones."""
        return bool(self._opaque)

    @property
    def state(self) -> list[Any]:
        return [entry.state for entry in self.entries]

    def before_pass(self, rows: int, proposed: int) -> None:
        """Prepare for a pass of `rows` tokens, the last `proposed` of which may be taken back: copy
        what that pass would make impossible to undo."""
        if proposed < rows:
            self._boundaries.clear()
        if proposed and (self._opaque or self._window):
            self._keep_copies(whole_pass=proposed == rows)
        self.length += rows

    def _keep_copies(self, whole_pass: bool) -> None:
        # Beside opaque state, a window has to be able to lose a pass completely as well.
        whole_pass = whole_pass or bool(self._opaque)
        windows = {i: self._slots[i].cache for i in self._window if whole_pass}
        # Until something has left a window, the next pass drops nothing either.
        full = [i for i, window in windows.items() if window.offset >= window.max_size]
        if need := [*self._opaque, *full]:
            # One deepcopy for all, so that what caches share stays shared among their copies.
            copies = copy.deepcopy({i: self._slots[i].cache for i in need})
            self._boundaries.append(_Boundary(self.length, copies))

    def rewind(self, length: int) -> int:
        """Go back to `length` tokens, or to the longest earlier length that can be reached. Returns
        the length reached, from which the caller feeds the accepted tokens again. What stays is
        final. Raises RewindError where no such length exists, or where a cache does not hold what
        it must afterwards; the caches are then no longer to be used."""
        target = self._reachable(length)
        for number in (*self._window, *self._opaque):
            self._return(number, target)
        if target < self.length:
            for number in self._append:
                self._slots[number].cache.trim(self.length - target)
        self._boundaries.clear()
        self.length = target
        self._check()
        return target

    def _reachable(self, length: int) -> int:
        earlier = [b.length for b in reversed(self._boundaries) if b.length < length]
        for target in (length, *earlier):
            if all(self._can_return(i, target) for i in (*self._window, *self._opaque)):
                return target
        raise RewindError(
            f"cannot go back from {self.length} to {length} tokens: no copy was kept that far back"
        )

    def _source(self, number: int, target: int) -> tuple[_Boundary | None, int]:
        """The nearest state of a slot at or after `target`: a boundary (None: the live cache) and
        its length."""
        for boundary in self._boundaries:
            if boundary.length >= target and number in boundary.copies:
                return boundary, boundary.length
        return None, self.length

    def _can_return(self, number: int, target: int) -> bool:
        boundary, length = self._source(number, target)
        if length == target:
            return True
        cache = boundary.copies[number] if boundary else self._slots[number].cache
        return type(cache) is RotatingKVCache and _can_cut(cache, length - target)

    def _return(self, number: int, target: int) -> None:
        slot = self._slots[number]
        boundary, length = self._source(number, target)
        if boundary is not None:
            slot.holder[slot.index] = boundary.copies[number]
        if length > target:
            _cut(slot.cache, length - target)

    def _check(self) -> None:
        for number in (*self._append, *self._window):
            cache = self._slots[number].cache
            if cache.offset != self.length:
                raise RewindError(
                    f"cache {number} ({type(cache).__name__}) holds {cache.offset} tokens after a "
                    f"rewind to {self.length}; the text can no longer be trusted"
                )


def slots(holder: list[Any]) -> list[Slot]:
    """Return the places of all caches in a list, those in lists of caches included."""
    places: list[Slot] = []
    for index, cache in enumerate(holder):
        if type(cache) is CacheList:
            # mlx-lm builds a tuple and only ever indexes and walks it; ours must be replaceable. A
            # list is left as it is, since earlier slots refer to it.
            if not isinstance(cache.caches, list):
                cache.caches = list(cache.caches)
            places += slots(cache.caches)
        else:
            places.append(Slot(holder, index))
    return places


def _can_cut(window: RotatingKVCache, count: int) -> bool:
    """Whether dropping the newest `count` >= 1 entries leaves what plain decoding would have.
    Either no entry has left yet (then the write position is the offset), or the last pass had
    several tokens: those are appended in order to the max_size - 1 newest ones, and what is left
    must still fill the window. Single tokens overwrite in a ring, whose position stays below."""
    held = window._idx
    return held == window.offset or held - count >= window.max_size


def _cut(window: RotatingKVCache, count: int) -> None:
    window.offset -= count
    window._idx -= count
    if window.keys.shape[2] > window.max_size:
        # The next pass trims a longer buffer from the front: the dropped end must not be in it.
        window.keys = window.keys[..., : window._idx, :]
        window.values = window.values[..., : window._idx, :]
