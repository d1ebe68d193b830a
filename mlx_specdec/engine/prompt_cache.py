"""The prompt cache: a radix tree over token ids, whose nodes hold what was computed of their
stretch of a text in arrays of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import mlx.core as mx

from ..interfaces import Model, Proposer
from ..interfaces.results import NOTHING, TARGET, Cached, CachedPrefix, KVSlice, Reusable, Snapshot

Arrays = tuple[mx.array, ...]
BLOCK = 1024
"""Tokens that are compared at once."""
SHARED = 256
"""Tokens that prompts must have in common for one of them to be read before the others."""


class Node:
    """A stretch of tokens after the parent's, the first of them at place `begin` of the text.
    columns, snapshots: by name; the latter are of the text up to the node's end."""

    def __init__(self, parent: Node | None, begin: int, tokens: Sequence[int]) -> None:
        self.parent = parent
        self.begin = begin
        self.tokens = list(tokens)
        self.children: dict[int, Node] = {}
        self.columns: dict[str, Arrays] = {}
        self.snapshots: dict[str, Snapshot] = {}

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def nbytes(self) -> int:
        columns = sum(map(_nbytes, self.columns.values()))
        return columns + sum(each.nbytes for each in self.snapshots.values())

    def span(self, lag: int, end: int | None = None) -> tuple[int, int]:
        """Return the first and last + 1 of the columns that are known with the node's tokens before
        `end`."""
        return max(0, self.begin - lag), max(0, (self.end if end is None else end) - lag)


class PromptCache:
    """What was computed of earlier texts of one pair; the least recently used nodes are removed
    first. lags: by name, how many later tokens columns depend on. changed: whether anything was
    added or removed since it was loaded."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.clear()
        self.changed = False

    def clear(self) -> None:
        self.nbytes = 0
        self.lags: dict[str, int] = {}
        self.changed = True
        self._root = Node(None, 0, ())
        # From the least to the most recently used; a parent comes after its children.
        self._order: OrderedDict[Node, None] = OrderedDict()

    @property
    def nodes(self) -> Iterator[Node]:
        """The nodes from the most to the least recently used: parents before their children."""
        return reversed(self._order)

    @property
    def texts(self) -> Iterator[list[int]]:
        """The cached texts from the least to the most recently used."""
        for node in [each for each in self._order if not each.children]:
            stretches = [node.tokens]
            while (parent := node.parent) is not None:
                stretches.append(parent.tokens)
                node = parent
            yield [token for stretch in reversed(stretches) for token in stretch]

    def beginning(
        self, target: Model, prompt: Sequence[int], proposer: Proposer | None
    ) -> CachedPrefix:
        """Return what is cached of a prompt, whose newest token is left for the first round. A
        proposer of hidden states must see those of at least one token."""
        taps, needs = (False, ()) if proposer is None else (bool(proposer.taps), proposer.needs)
        return self.find(prompt, len(target.prefix(prompt)) - 1 - taps, needs)

    def find(self, prompt: Sequence[int], most: int, needs: Sequence[str] = ()) -> CachedPrefix:
        """Return what is cached of the beginning of a prompt. most: tokens that the target may
        leave unread. needs: names that must be cached of all of these."""
        path, matched = self._match(prompt)

        def columns(name: str) -> int:
            """Return how many columns there are without a gap from the beginning."""
            having = list(takewhile(lambda node: name in node.columns, path))
            end = min(having[-1].end, matched) if having else 0
            return max(0, end - self.lags.get(name, 0))

        def take(name: str, most: int) -> Cached | None:
            """Return what is cached of at most so many tokens; None where nothing is."""
            count = min(most, columns(name))
            if count > 0:
                return KVSlice(count, self._joined(path, name, count))
            for node in reversed(path):
                each = node.snapshots.get(name)
                if each is None or node.end > matched:
                    continue
                if each.length == len(prompt) if each.exact else each.length <= most:
                    return each
            return None

        target = take(TARGET, min([most, *map(columns, needs)]))
        if target is None:
            return NOTHING
        self._touch(path)
        names = {name for node in path for name in (*node.columns, *node.snapshots)} - {TARGET}
        unread = 0 if isinstance(target, Snapshot) and target.exact else target.length
        proposer = {name: part for name in sorted(names) if (part := take(name, unread))}
        return CachedPrefix(target, proposer)

    def waits(self, prompt: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether a prompt shares a long beginning with another, which is not cached yet."""
        return common(other, prompt) >= self._match(prompt)[1] + SHARED

    def keep(
        self, prompt: Sequence[int], committed: Sequence[int], computed: Mapping[str, Reusable]
    ) -> None:
        """Add what was computed of a text. committed: its tokens, of which the newest may be
        unseen. Where that fails, everything is removed, since half of it may have been added."""
        try:
            for name, each in computed.items():
                if each.snapshot is not None:
                    text = prompt if each.snapshot.exact else committed
                    self._keep_snapshot(text[: each.snapshot.length], name, each.snapshot)
                elif each.columns is not None:
                    end = min(each.length + each.lag, len(committed) - 1)
                    self._keep_columns(committed[:end], name, each)
        except BaseException:
            self.clear()
            raise

    def put(self, node: Node, name: str, value: Arrays | Snapshot) -> None:
        """Add a part to a node that lacks it."""
        if isinstance(value, Snapshot):
            node.snapshots[name] = value
            self.nbytes += value.nbytes
        else:
            node.columns[name] = value
            self.nbytes += _nbytes(value)
        self.changed = True

    def add_oldest(self, parent: Node | None, tokens: Sequence[int]) -> Node:
        """Add a node after a parent, or None for the root, as the least recently used one."""
        above = parent or self._root
        node = self._add(Node(above, above.end, tokens))
        self._order.move_to_end(node, last=False)
        return node

    def _keep_snapshot(self, text: Sequence[int], name: str, snapshot: Snapshot) -> None:
        if snapshot.nbytes > self.max_bytes:
            return
        path = self._grow(text)
        if name not in path[-1].snapshots and self._make_room(snapshot.nbytes, path):
            # Views of a batch would keep all of it in memory.
            self.put(path[-1], name, replace(snapshot, arrays=owned(snapshot.arrays)))

    def _keep_columns(self, text: Sequence[int], name: str, computed: Reusable) -> None:
        columns, lag = computed.columns, computed.lag
        assert columns is not None
        count = len(text) - lag
        if count < 1 or _nbytes(columns(0, count)) > self.max_bytes:
            return
        self.lags[name] = lag
        path = self._grow(text)
        lacking = {node: columns(*node.span(lag)) for node in path if name not in node.columns}
        if self._make_room(sum(map(_nbytes, lacking.values())), path):
            for node, views in lacking.items():
                self.put(node, name, owned(views))

    def _joined(self, path: Sequence[Node], name: str, count: int) -> Arrays:
        """Return the first columns along a path, in one piece."""
        stretches = []
        for node in path:
            first, end = node.span(self.lags[name])
            if first < count:
                part = slice(0, min(end, count) - first)
                stretches.append([array[:, :, part] for array in node.columns[name]])
        return tuple(mx.concatenate(list(parts), axis=2) for parts in zip(*stretches, strict=True))

    def _make_room(self, nbytes: int, path: Sequence[Node]) -> bool:
        """Remove the least recently used nodes until so many more bytes fit; returns False where
        they do not. Nodes on the path stay, but for empty ones at its end."""
        while self.nbytes + nbytes > self.max_bytes:
            oldest = next(iter(self._order), None)
            if oldest is None or oldest in path:
                for node in reversed(path):
                    if node.children or node.columns or node.snapshots:
                        break
                    self._remove(node)
                return False
            self._remove(oldest)
        return True

    def _match(self, text: Sequence[int]) -> tuple[list[Node], int]:
        """Return the nodes along the beginning of a text, and how many of its tokens they share;
        the last node may have more."""
        path: list[Node] = []
        node, matched = self._root, 0
        while matched == node.end and matched < len(text) and text[matched] in node.children:
            node = node.children[text[matched]]
            path.append(node)
            matched += common(node.tokens, text, matched)
        return path, matched

    def _grow(self, text: Sequence[int]) -> list[Node]:
        """Return the nodes of a text, the last of which ends with it, after adding what lacks."""
        path, matched = self._match(text)
        if path and matched < path[-1].end:
            path[-1] = self._split(path[-1], matched)
        if matched < len(text):
            parent = path[-1] if path else self._root
            path.append(self._add(Node(parent, matched, text[matched:])))
        self._touch(path)
        return path

    def _touch(self, path: Sequence[Node]) -> None:
        """Make these nodes, parents first, the most recently used ones."""
        for node in reversed(path):
            self._order.move_to_end(node)

    def _add(self, node: Node) -> Node:
        assert node.parent is not None
        node.parent.children[node.tokens[0]] = node
        self._order[node] = None
        return node

    def _remove(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        del node.parent.children[node.tokens[0]]
        del self._order[node]
        self.nbytes -= node.nbytes

    def _split(self, node: Node, at: int) -> Node:
        """Return a new parent of a node, which then begins at `at`."""
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


def owned(views: Iterable[mx.array]) -> Arrays:
    """Return computed copies of views, which share no memory with other arrays."""
    arrays = tuple(mx.contiguous(view) for view in views)
    mx.eval(arrays)
    return arrays


def common(tokens: Sequence[int], text: Sequence[int], begin: int = 0) -> int:
    """Return how many of `tokens` the text continues with from `begin`."""
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


def _nbytes(arrays: Sequence[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)
