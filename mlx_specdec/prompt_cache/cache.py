"""What is known of a prompt's beginning, and what is kept of a text, within a bound of bytes.

A text that a hit begins is the text without one: what is kept is found by the tokens that it was
computed of, and never written to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from ..contracts import Model, Proposer
from ..kept import NOTHING, TARGET, Beginning, Columns, Kept, Memory, Whole
from .tree import Node, Tree, common, owned

SHARED = 256
"""Tokens that prompts have to begin with alike for one of them to be read before the others."""


class PromptCache:
    """Of one pair of models. max_bytes: of all arrays; what was used longest ago goes first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.tree = Tree()
        self.changed = False

    @property
    def nbytes(self) -> int:
        """Size of what is kept."""
        return self.tree.nbytes

    def beginning(
        self, target: Model, prompt: Sequence[int], proposer: Proposer | None
    ) -> Beginning:
        """What is known of a prompt, whose newest token is left for the first round. A proposer of
        hidden states is shown those of at least one token."""
        taps, needs = (False, ()) if proposer is None else (bool(proposer.taps), proposer.needs)
        return self.find(prompt, len(target.prefix(prompt)) - 1 - taps, needs)

    def find(self, prompt: Sequence[int], most: int, needs: Sequence[str] = ()) -> Beginning:
        """What is known of the beginning of a prompt.

        most: how many tokens at most the target may leave unread. needs: what has to be known of
        all of these, by name.
        """
        path, matched = self.tree.match(prompt)
        known = _Known(self.tree, path, matched, len(prompt))
        most = min([most, *(known.columns(name) for name in needs)])
        target = known.take(TARGET, most)
        if target is None:
            return NOTHING
        self.tree.touch(path)
        names = {name for node in path for name in (*node.columns, *node.wholes)} - {TARGET}
        unread = 0 if isinstance(target, Whole) and target.exact else target.length
        proposer = {name: kept for name in sorted(names) if (kept := known.take(name, unread))}
        return Beginning(target, proposer)

    def waits(self, prompt: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether a prompt shares a long beginning, which is not cached yet, with another
        one that is being read."""
        return common(other, prompt) >= self.tree.match(prompt)[1] + SHARED

    def keep(
        self, prompt: Sequence[int], committed: Sequence[int], memories: Mapping[str, Memory]
    ) -> None:
        """Keep what was computed of a text. committed: its tokens, of which the newest may be
        unseen. Where that fails, nothing at all is kept any more: half of it may be there."""
        try:
            self._keep(prompt, committed, memories)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Forget everything."""
        self.tree, self.changed = Tree(), True

    def _keep(
        self, prompt: Sequence[int], committed: Sequence[int], memories: Mapping[str, Memory]
    ) -> None:
        for name, memory in memories.items():
            if memory.whole is not None:
                text = prompt if memory.whole.exact else committed
                self._keep_whole(text[: memory.whole.length], name, memory.whole)
            elif memory.columns is not None:
                end = min(memory.length + memory.lag, len(committed) - 1)
                self._keep_columns(committed[:end], name, memory)

    def _keep_whole(self, text: Sequence[int], name: str, whole: Whole) -> None:
        if whole.nbytes > self.max_bytes:
            return
        path = self.tree.grow(text)
        if name not in path[-1].wholes and self._make_room(whole.nbytes, path):
            if whole.value is None:
                # Views of a batch would keep all of it in memory.
                whole = replace(whole, arrays=owned(whole.arrays))
            mx.eval(whole.arrays)
            self._put(path[-1], name, whole)

    def _keep_columns(self, text: Sequence[int], name: str, memory: Memory) -> None:
        assert memory.columns is not None
        count = len(text) - memory.lag
        if count < 1 or _nbytes(memory.columns(0, count)) > self.max_bytes:
            return
        self.tree.lags[name] = memory.lag
        path = self.tree.grow(text)
        lacking = {
            node: memory.columns(*node.span(memory.lag))
            for node in path
            if name not in node.columns
        }
        if self._make_room(sum(map(_nbytes, lacking.values())), path):
            for node, views in lacking.items():
                self._put(node, name, owned(views))

    def _put(self, node: Node, name: str, value: tuple[mx.array, ...] | Whole) -> None:
        self.tree.put(node, name, value)
        self.changed = True

    def _make_room(self, nbytes: int, path: Sequence[Node]) -> bool:
        """Whether so many bytes more fit, without what was used longest ago; what is on the path
        stays, but for its end where nothing is in it."""
        while self.tree.nbytes + nbytes > self.max_bytes:
            oldest = self.tree.oldest
            if oldest is None or oldest in path:
                self._prune(path)
                return False
            self.tree.remove(oldest)
        return True

    def _prune(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            if node.children or node.columns or node.wholes:
                return
            self.tree.remove(node)


class _Known:
    """What the nodes along a prompt have of it. matched: tokens. length: of the prompt."""

    def __init__(self, tree: Tree, path: Sequence[Node], matched: int, length: int) -> None:
        self._lags = tree.lags
        self._path = path
        self._matched = matched
        self._length = length

    def columns(self, name: str) -> int:
        """How many columns there are from the beginning on."""
        end = 0
        for node in self._path:
            if name not in node.columns:
                break
            end = min(node.end, self._matched)
        return max(0, end - self._lags.get(name, 0))

    def take(self, name: str, most: int) -> Kept | None:
        """Of at most so many tokens; None where there is nothing."""
        count = min(most, self.columns(name))
        return Columns(count, self._joined(name, count)) if count > 0 else self._whole(name, most)

    def _joined(self, name: str, count: int) -> tuple[mx.array, ...]:
        stretches = []
        for node in self._path:
            first, end = node.span(self._lags[name])
            if first < count:
                stretches.append(
                    [each[:, :, : min(end, count) - first] for each in node.columns[name]]
                )
        return tuple(mx.concatenate(list(parts), axis=2) for parts in zip(*stretches, strict=True))

    def _whole(self, name: str, most: int) -> Whole | None:
        """The longest one."""
        for node in reversed(self._path):
            whole = node.wholes.get(name)
            if whole is None or node.end > self._matched:
                continue
            if whole.length == self._length if whole.exact else whole.length <= most:
                return whole
        return None


def _nbytes(arrays: Sequence[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)
