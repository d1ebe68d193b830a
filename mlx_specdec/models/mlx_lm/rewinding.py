"""Rewinding of mlx-lm's caches: exactly, or to an earlier length from which tokens are fed again.

There are three kinds of caches, which are recognized by their exact class:

    append   KVCache and QuantizedKVCache store entries in order and overwrite none. A rewind lowers
             the number of entries.
    window   RotatingKVCache can drop its newest entries as long as the remaining entries fill the
             window in order.
    opaque   All other caches, such as recurrent state, are copied before a pass that may be undone.

`RotatingKVCache.trim` is not used: once the window has wrapped, it lowers the length without an
error, although the entries that were overwritten are missing.
Copies are made by `copy.deepcopy`. They share memory until the cache or the copy is written to."""

import copy
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from ...errors import RewindError


@dataclass(frozen=True)
class Slot:
    """The place of one cache: the list that holds it, through which models reach it, and the index
    in this list."""

    holder: list[Any]
    index: int

    @property
    def cache(self) -> Any:
        return self.holder[self.index]


@dataclass(frozen=True)
class _Boundary:
    """Copies of caches from before a pass that would overwrite them.

    Attributes:
        length: Number of tokens in the copies.
        copies: Copies by the number of the cache's slot."""

    length: int
    copies: dict[int, Any]


class RewindableCache:
    """The caches of one sequence, as a model's `make_cache` returns them.

    The caller calls `before_pass` before every pass, and `rewind` to undo it. A pass must add
    exactly `rows` tokens to every cache.

    Args:
        entries: The list that is passed to the model. A rewind may replace its elements.
        length: Number of tokens that all of the caches hold."""

    def __init__(self, entries: list[Any], length: int = 0) -> None:
        self.entries = entries
        self.length = length
        self._slots = slots(entries)
        kinds = [type(slot.cache) for slot in self._slots]
        self._append = [i for i, kind in enumerate(kinds) if kind in (KVCache, QuantizedKVCache)]
        self._window = [i for i, kind in enumerate(kinds) if kind is RotatingKVCache]
        transparent = {*self._append, *self._window}
        self._opaque = [i for i in range(len(kinds)) if i not in transparent]
        self._boundaries: list[_Boundary] = []

    @property
    def replays(self) -> bool:
        """Whether a rewind to the middle of a pass needs another pass over the accepted tokens."""
        return bool(self._opaque)

    @property
    def state(self) -> list[Any]:
        return [entry.state for entry in self.entries]

    def before_pass(self, rows: int, proposed: int) -> None:
        """Copy the caches that could not be rewound after a pass.

        Args:
            rows: Number of tokens in the pass.
            proposed: How many of the last tokens may be undone."""
        if proposed < rows:
            self._boundaries.clear()
        if proposed and (self._opaque or self._window):
            self._keep_copies(whole_pass=proposed == rows)
        self.length += rows

    def _keep_copies(self, whole_pass: bool) -> None:
        # If there is opaque state, a rewind goes back before the pass, and windows must follow.
        whole_pass = whole_pass or bool(self._opaque)
        windows = {i: self._slots[i].cache for i in self._window if whole_pass}
        # A window that is not full needs no copy, because the pass overwrites no entry.
        full = [i for i, window in windows.items() if window.offset >= window.max_size]
        if need := [*self._opaque, *full]:
            # Copy all at once, so that objects that caches share are shared by the copies too.
            copies = copy.deepcopy({i: self._slots[i].cache for i in need})
            self._boundaries.append(_Boundary(self.length, copies))

    def rewind(self, length: int) -> int:
        """Go back to `length` tokens, or to the nearest smaller length that can be reached. The
        remaining tokens are final.

        Returns:
            The number of tokens in the caches. The caller feeds the accepted tokens after them
            again.
        Raises:
            RewindError: If no such length exists, or a cache holds another number of tokens after
                the rewind. The caches must not be used afterwards."""
        target = self._reachable(length)
        for number in (*self._window, *self._opaque):
            self._restore(number, target)
        if target < self.length:
            for number in self._append:
                self._slots[number].cache.trim(self.length - target)
        self._boundaries.clear()
        self.length = target
        self._check()
        return target

    def _reachable(self, length: int) -> int:
        """Return the largest length, up to `length`, to which all caches can go back."""
        earlier = [b.length for b in reversed(self._boundaries) if b.length < length]
        for target in (length, *earlier):
            if all(self._can_restore(i, target) for i in (*self._window, *self._opaque)):
                return target
        raise RewindError(
            f"cannot go back from {self.length} to {length} tokens: no copy was kept that far back"
        )

    def _source(self, number: int, target: int) -> tuple[_Boundary | None, int]:
        """Return the shortest state of a slot with at least `target` tokens, and its number of
        tokens. The state is a boundary, or None for the cache itself."""
        for boundary in self._boundaries:
            if boundary.length >= target and number in boundary.copies:
                return boundary, boundary.length
        return None, self.length

    def _can_restore(self, number: int, target: int) -> bool:
        boundary, length = self._source(number, target)
        if length == target:
            return True
        cache = boundary.copies[number] if boundary else self._slots[number].cache
        return type(cache) is RotatingKVCache and _can_cut(cache, length - target)

    def _restore(self, number: int, target: int) -> None:
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
    """Return the slots of all caches in a list, including those inside of a CacheList."""
    places: list[Slot] = []
    for index, cache in enumerate(holder):
        if type(cache) is CacheList:
            # mlx-lm uses a tuple, whose elements cannot be replaced. A list comes from an earlier
            # call, whose slots refer to it.
            if not isinstance(cache.caches, list):
                cache.caches = list(cache.caches)
            places += slots(cache.caches)
        else:
            places.append(Slot(holder, index))
    return places


def _can_cut(window: RotatingKVCache, count: int) -> bool:
    """Return whether a window without its newest `count` >= 1 entries is what plain decoding would
    have left.

    That holds if no entry has been dropped yet: then the write position equals the offset. It also
    holds after a pass of several tokens, which are appended in order to the max_size - 1 newest
    entries, if the remaining entries fill the window. Single tokens overwrite entries in a ring,
    whose write position stays below max_size."""
    held = window._idx
    return held == window.offset or held - count >= window.max_size


def _cut(window: RotatingKVCache, count: int) -> None:
    window.offset -= count
    window._idx -= count
    if window.keys.shape[2] > window.max_size:
        # The next pass trims a longer buffer from the front, so it must not contain dropped
        # entries.
        window.keys = window.keys[..., : window._idx, :]
        window.values = window.values[..., : window._idx, :]
