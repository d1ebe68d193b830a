"""A radix tree over token ids: texts that begin alike share what was computed of their beginning.

Knows tokens and arrays, and no model. A node has the columns of its own stretch of tokens in
arrays of their own, so that their bytes are all that it takes. The names are those of `kept`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from ..interfaces import Model, Proposer
from ..interfaces.reusable import NOTHING, TARGET, Cached, CachedPrefix, KVSlice, Reusable, Snapshot

Arrays = tuple[mx.array, ...]
BLOCK = 1024
"""Tokens that are compared at once."""


class Node:
    """A stretch of tokens behind the parent's, the first of them at place `begin` of the text.

    columns: by name. wholes: by name, of the text up to the node's end.
    """

    def __init__(self, parent: Node | None, begin: int, tokens: Sequence[int]) -> None:
        self.parent = parent
        self.begin = begin
        self.tokens = list(tokens)
        self.children: dict[int, Node] = {}
        self.columns: dict[str, Arrays] = {}
        self.wholes: dict[str, Snapshot] = {}

    @property
    def end(self) -> int:
        """The place behind the last token."""
        return self.begin + len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        arrays = sum(array.nbytes for own in self.columns.values() for array in own)
        return arrays + sum(whole.nbytes for whole in self.wholes.values())

    def span(self, lag: int, end: int | None = None) -> tuple[int, int]:
        """The columns that belong to the tokens before `end`: those that are known as soon as these
        tokens are."""
        return max(0, self.begin - lag), max(0, (self.end if end is None else end) - lag)


class Tree:
    """Nodes, and the order in which they were used; the oldest one never has children.

    lags: how many tokens behind their own columns of a name were made of. nbytes: of all arrays.
    """

    def __init__(self) -> None:
        self.lags: dict[str, int] = {}
        self.nbytes = 0
        self._root = Node(None, 0, ())
        self._order: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Node]:
        """From the newest to the oldest: parents before their children."""
        return reversed(self._order)

    @property
    def oldest(self) -> Node | None:
        """The node that was used longest ago."""
        return next(iter(self._order), None)

    def match(self, text: Sequence[int]) -> tuple[list[Node], int]:
        """The nodes along the beginning of a text, and how many of its tokens they share: the last
        node may go on otherwise."""
        path: list[Node] = []
        node, matched = self._root, 0
        while matched == node.end and matched < len(text) and text[matched] in node.children:
            node = node.children[text[matched]]
            path.append(node)
            matched += common(node.tokens, text, matched)
        return path, matched

    def grow(self, text: Sequence[int]) -> list[Node]:
        """The nodes of a text, the last of which ends with it; they are the newest then."""
        path, matched = self.match(text)
        if path and matched < path[-1].end:
            path[-1] = self._split(path[-1], matched)
        if matched < len(text):
            parent = path[-1] if path else self._root
            path.append(self._add(Node(parent, matched, text[matched:])))
        self.touch(path)
        return path

    def touch(self, path: Sequence[Node]) -> None:
        """These nodes, parents first, were used."""
        for node in reversed(path):
            self._order.move_to_end(node)

    def put(self, node: Node, name: str, value: Arrays | Snapshot) -> None:
        """Give a node what it lacked."""
        if isinstance(value, Snapshot):
            node.wholes[name] = value
            self.nbytes += value.nbytes
        else:
            node.columns[name] = value
            self.nbytes += sum(array.nbytes for array in value)

    def add_oldest(self, parent: Node | None, tokens: Sequence[int]) -> Node:
        """A new node behind a parent, None for the beginning of texts, which is older than all."""
        above = parent or self._root
        if not tokens or tokens[0] in above.children:
            raise ValueError("two of its nodes are one")
        node = self._add(Node(above, above.end, tokens))
        self._order.move_to_end(node, last=False)
        return node

    def remove(self, node: Node) -> None:
        """Forget a node without children."""
        assert node.parent is not None and not node.children
        del node.parent.children[node.tokens[0]]
        del self._order[node]
        self.nbytes -= node.nbytes

    def _add(self, node: Node) -> Node:
        assert node.parent is not None
        node.parent.children[node.tokens[0]] = node
        self._order[node] = None
        return node

    def _split(self, node: Node, at: int) -> Node:
        """The new parent of a node that goes on from `at`."""
        count = at - node.begin
        upper = Node(node.parent, node.begin, node.tokens[:count])
        for name, arrays in node.columns.items():
            first, end = node.span(self.lags[name], at)
            upper.columns[name] = owned(array[:, :, : end - first] for array in arrays)
            node.columns[name] = owned(array[:, :, end - first :] for array in arrays)
        node.begin, node.tokens, node.parent = at, node.tokens[count:], upper
        self._add(upper)
        upper.children[node.tokens[0]] = node
        return upper


def owned(views: Iterator[mx.array] | Sequence[mx.array]) -> Arrays:
    """The same numbers in memory that nothing else is in, computed."""
    arrays = tuple(mx.contiguous(view) for view in views)
    mx.eval(arrays)
    return arrays


def common(tokens: Sequence[int], text: Sequence[int], begin: int = 0) -> int:
    """How many of `tokens` the text goes on with from `begin`."""
    most = min(len(tokens), len(text) - begin)
    # Python compares whole lists 20 times as fast as their elements one by one.
    for at in range(0, most, BLOCK):
        block, there = tokens[at : at + BLOCK], text[begin + at : begin + at + BLOCK]
        if block != there:
            pairs = enumerate(zip(block, there, strict=False), at)
            differs = next((place for place, (one, other) in pairs if one != other), None)
            if differs is not None:
                return differs
    return max(0, most)


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
    ) -> CachedPrefix:
        """What is known of a prompt, whose newest token is left for the first round. A proposer of
        hidden states is shown those of at least one token."""
        taps, needs = (False, ()) if proposer is None else (bool(proposer.taps), proposer.needs)
        return self.find(prompt, len(target.prefix(prompt)) - 1 - taps, needs)

    def find(self, prompt: Sequence[int], most: int, needs: Sequence[str] = ()) -> CachedPrefix:
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
        unread = 0 if isinstance(target, Snapshot) and target.exact else target.length
        proposer = {name: kept for name in sorted(names) if (kept := known.take(name, unread))}
        return CachedPrefix(target, proposer)

    def waits(self, prompt: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether a prompt shares a long beginning, which is not cached yet, with another
        one that is being read."""
        return common(other, prompt) >= self.tree.match(prompt)[1] + SHARED

    def keep(
        self, prompt: Sequence[int], committed: Sequence[int], memories: Mapping[str, Reusable]
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
        self, prompt: Sequence[int], committed: Sequence[int], memories: Mapping[str, Reusable]
    ) -> None:
        for name, memory in memories.items():
            if memory.snapshot is not None:
                text = prompt if memory.snapshot.exact else committed
                self._keep_whole(text[: memory.snapshot.length], name, memory.snapshot)
            elif memory.columns is not None:
                end = min(memory.length + memory.lag, len(committed) - 1)
                self._keep_columns(committed[:end], name, memory)

    def _keep_whole(self, text: Sequence[int], name: str, whole: Snapshot) -> None:
        if whole.nbytes > self.max_bytes:
            return
        path = self.tree.grow(text)
        if name not in path[-1].wholes and self._make_room(whole.nbytes, path):
            if whole.value is None:
                # Views of a batch would keep all of it in memory.
                whole = replace(whole, arrays=owned(whole.arrays))
            mx.eval(whole.arrays)
            self._put(path[-1], name, whole)

    def _keep_columns(self, text: Sequence[int], name: str, memory: Reusable) -> None:
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

    def _put(self, node: Node, name: str, value: tuple[mx.array, ...] | Snapshot) -> None:
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

    def take(self, name: str, most: int) -> Cached | None:
        """Of at most so many tokens; None where there is nothing."""
        count = min(most, self.columns(name))
        return KVSlice(count, self._joined(name, count)) if count > 0 else self._whole(name, most)

    def _joined(self, name: str, count: int) -> tuple[mx.array, ...]:
        stretches = []
        for node in self._path:
            first, end = node.span(self._lags[name])
            if first < count:
                stretches.append(
                    [each[:, :, : min(end, count) - first] for each in node.columns[name]]
                )
        return tuple(mx.concatenate(list(parts), axis=2) for parts in zip(*stretches, strict=True))

    def _whole(self, name: str, most: int) -> Snapshot | None:
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
