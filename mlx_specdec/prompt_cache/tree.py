"""A radix tree over token ids: texts that begin alike share what was computed of their beginning.

Knows tokens and arrays, and no model. A node has the columns of its own stretch of tokens in
arrays of their own, so that their bytes are all that it takes. The names are those of `kept`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import mlx.core as mx

from ..kept import Whole

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
        self.wholes: dict[str, Whole] = {}

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

    def put(self, node: Node, name: str, value: Arrays | Whole) -> None:
        """Give a node what it lacked."""
        if isinstance(value, Whole):
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
