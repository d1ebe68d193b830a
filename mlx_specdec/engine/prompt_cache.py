"""The prompt cache: a radix tree over token ids, whose nodes hold what was computed of their
stretch of a text in arrays of their own."""

from __future__ import annotations

import hashlib
from array import array as numbers
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import mlx.core as mx

from ..interfaces import Model, Proposer
from ..interfaces.results import NOTHING, TARGET, Cached, CachedPrefix, KVSlice, Reusable, Snapshot
from .prompt_cache_disk import Block, Directory, Record, nbytes_of

Arrays = tuple[mx.array, ...]
BLOCK = 1024
"""Tokens that are compared at once."""
STRETCH = 256
"""The most tokens of a block on disk."""
SHARED = 256
"""Tokens that prompts must have in common for one of them to be read before the others."""


class Node:
    """A stretch of tokens after the parent's, the first of them at place `begin` of the text.
    columns, snapshots: by name, in memory; the latter are of the text up to the node's end. blocks:
    on disk, by name and whether it is a snapshot. tenant: whose text it is. text: the running
    digest of tenant and whole text."""

    def __init__(
        self, parent: Node | None, begin: int, tokens: Sequence[int], tenant: str = ""
    ) -> None:
        self.parent = parent
        self.tenant: str = tenant if parent is None else parent.tenant
        self.begin = begin
        self.tokens = list(tokens)
        self.children: dict[int, Node] = {}
        self.columns: dict[str, Cached] = {}
        self.snapshots: dict[str, Cached] = {}
        self.blocks: dict[tuple[str, bool], Block] = {}
        root = hashlib.blake2b(tenant.encode(), digest_size=32)
        self.text: hashlib.blake2b = root if parent is None else parent.text.copy()
        self.text.update(numbers("q", self.tokens).tobytes())

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def is_empty(self) -> bool:
        return not (self.columns or self.snapshots or self.children or self.blocks)

    @property
    def nbytes(self) -> int:
        parts = (*self.columns.values(), *self.snapshots.values())
        return sum(part.nbytes for part in parts)

    def span(self, lag: int, end: int | None = None) -> tuple[int, int]:
        """Return first and last + 1 of the columns that the node's tokens before `end` complete."""
        return max(0, self.begin - lag), max(0, (self.end if end is None else end) - lag)


class PromptCache:
    """A prefix cache: the KV caches of earlier texts of one pair, for `stream_generate`. The least
    recently used entries are removed first. Each tenant has a tree of its own, since the speed of a
    hit would tell what others wrote.

    Attributes:
        max_bytes: The most bytes that it takes in memory.
        nbytes: The bytes that it takes.
        disk: A directory with a block of each part of each node, and of nodes that do not fit into
            memory.
        lags: By name, how many later tokens columns depend on.
    """

    def __init__(self, max_bytes: int, disk: Directory | None = None) -> None:
        self.max_bytes = max_bytes
        self.disk = disk
        self._order: OrderedDict[Node, None] = OrderedDict()
        self.clear()
        if disk is not None:
            self._adopt(disk, disk.blocks())

    def close(self) -> None:
        """Wait until all is on disk."""
        if self.disk is not None:
            self.disk.close()

    def clear(self) -> None:
        if self.disk is not None:
            for node in self._order:
                self._forget(node)
        self.nbytes = 0
        self.lags: dict[str, int] = {}
        self._roots: dict[str, Node] = {}
        # From the least to the most recently used; a parent comes after its children.
        self._order = OrderedDict()
        self._recent: Sequence[Node] = ()

    @property
    def texts(self) -> Iterator[list[int]]:
        """The cached texts from the least to the most recently used."""
        for leaf in [each for each in self._order if not each.children]:
            yield [token for node in _path(leaf) for token in node.tokens]

    def beginning(
        self, target: Model, prompt: Sequence[int], proposer: Proposer | None, tenant: str = ""
    ) -> CachedPrefix:
        """Return what is cached of a prompt, whose newest token is left for the first round. A
        proposer of hidden states must see those of at least one token."""
        taps, needs = (False, ()) if proposer is None else (bool(proposer.taps), proposer.needs)
        return self.find(prompt, len(target.prefix(prompt)) - 1 - taps, needs, tenant)

    def find(
        self, prompt: Sequence[int], most: int, needs: Sequence[str] = (), tenant: str = ""
    ) -> CachedPrefix:
        """Return what is cached of the beginning of a prompt. most: tokens that the target may
        leave unread. needs: names that must be cached of all of these."""
        path, matched = self._match(prompt, self._root(tenant))
        if self.disk is not None:
            self._recall(self.disk, path, matched, most, len(prompt))

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
        unread = 0 if target.exact else target.length
        proposer = {name: part for name in sorted(names) if (part := take(name, unread))}
        return CachedPrefix(target, proposer)

    def waits(self, prompt: Sequence[int], other: Sequence[int], tenant: str = "") -> bool:
        """Return whether a prompt shares a long beginning with another of the same tenant, which is
        not cached yet."""
        return common(other, prompt) >= self._match(prompt, self._root(tenant))[1] + SHARED

    def keep(
        self,
        prompt: Sequence[int],
        committed: Sequence[int],
        computed: Mapping[str, Reusable],
        tenant: str = "",
    ) -> None:
        """Add what was computed of a text. committed: its tokens, of which the newest may be
        unseen. Where that fails, everything is removed, since half of it may have been added."""
        root = self._root(tenant)
        try:
            for name, each in computed.items():
                if each.snapshot is not None:
                    text = prompt if each.snapshot.exact else committed
                    self._keep_snapshot(root, text[: each.snapshot.length], name, each.snapshot)
                else:
                    end = min(each.length + each.lag, len(committed) - 1)
                    self._keep_columns(root, committed[:end], name, each)
        except BaseException:
            self.clear()
            raise

    def put(self, node: Node, name: str, value: Cached) -> None:
        """Add a part to a node that lacks it."""
        parts = node.snapshots if value.is_snapshot else node.columns
        parts[name] = value
        self.nbytes += value.nbytes
        self._store(node, name, value)

    def _root(self, tenant: str) -> Node:
        return self._roots.get(tenant) or Node(None, 0, (), tenant)

    def _keep_snapshot(
        self, root: Node, text: Sequence[int], name: str, snapshot: Snapshot
    ) -> None:
        if snapshot.nbytes > self.max_bytes:
            return
        path = self._grow(text, root)
        if name not in path[-1].snapshots and self._make_room(snapshot.nbytes, path):
            # Views of a batch would keep all of it in memory.
            self.put(path[-1], name, replace(snapshot, arrays=owned(snapshot.arrays)))

    def _keep_columns(self, root: Node, text: Sequence[int], name: str, computed: Reusable) -> None:
        columns, lag = computed.columns, computed.lag
        count = len(text) - lag
        if columns is None or count < 1 or _nbytes(columns(0, count)) > self.max_bytes:
            return
        self.lags[name] = lag
        path = self._grow(text, root)
        lacking = {node: columns(*node.span(lag)) for node in path if name not in node.columns}
        if self._make_room(sum(map(_nbytes, lacking.values())), path):
            for node, views in lacking.items():
                self.put(node, name, owned_slice(views))

    def _joined(self, path: Sequence[Node], name: str, count: int) -> Arrays:
        """Return the first columns along a path, in one piece."""
        stretches = []
        for node in path:
            first, end = node.span(self.lags[name])
            if first < count:
                part = slice(0, min(end, count) - first)
                stretches.append([array[:, :, part] for array in node.columns[name].arrays])
        return tuple(mx.concatenate(list(parts), axis=2) for parts in zip(*stretches, strict=True))

    def _make_room(self, nbytes: int, path: Sequence[Node]) -> bool:
        """Remove the least recently used nodes until so many more bytes fit; returns False where
        they do not. Nodes on the path stay, but for empty ones at its end."""
        while self.nbytes + nbytes > self.max_bytes:
            held = (n for n in self._order if n.columns or n.snapshots or n.is_empty)
            oldest = next(held, None)
            if oldest is None or oldest in path:
                for node in takewhile(lambda node: node.is_empty, reversed(path)):
                    self._remove(node)
                return False
            for block in oldest.blocks.values():
                block.written.wait()  # it holds the same arrays
            self.nbytes -= oldest.nbytes
            oldest.columns, oldest.snapshots = {}, {}
            if oldest.is_empty:
                self._remove(oldest)
        return True

    def _store(self, node: Node, name: str, value: Cached) -> None:
        """Write a part of a node to disk, if there is one that lacks it and has room."""
        disk, snapshot = self.disk, value.is_snapshot
        if disk is None or name not in disk.models or (name, snapshot) in node.blocks:
            return
        # A snapshot can come without columns of the nodes before.
        path = _path(node) if snapshot else [node]
        tokens = [token for each in path for token in each.tokens]
        assert path[0].parent is not None
        at = path[0].parent.text.hexdigest(), path[0].begin, tokens
        lag = 0 if snapshot else self.lags[name]
        record = Record(name, disk.models[name], *at, lag, snapshot, value.value, node.tenant)
        size = nbytes_of(record, value)
        while disk.nbytes + size > disk.max_bytes:
            if disk.remove_other():
                continue
            oldest = next((each for each in self._order if each.blocks), None)
            if oldest is None or oldest in self._recent:
                return
            self._forget(oldest)
            if oldest.is_empty:
                self._remove(oldest)
        node.blocks[name, snapshot] = disk.write(record, value)

    def _forget(self, node: Node, names: Iterable[tuple[str, bool]] | None = None) -> None:
        """Remove blocks of a node, all of them by default."""
        assert self.disk is not None
        for key in list(node.blocks if names is None else names):
            self.disk.remove(node.blocks.pop(key))

    def _read(self, disk: Directory, node: Node, key: tuple[str, bool], path: list[Node]) -> bool:
        """Have a part of a node in memory that disk has. Returns False where that is impossible;
        nodes on the path stay."""
        name, snapshot = key
        if name in (node.snapshots if snapshot else node.columns):
            return True
        value = disk.read(node.blocks[key])
        if value is None:
            self._forget(node, [key])
            return False
        if not self._make_room(value.nbytes, path):
            return False
        self.put(node, name, value)
        return True

    def _recall(
        self, disk: Directory, path: list[Node], matched: int, most: int, whole: int
    ) -> None:
        """Read what only the disk has of a path: columns, and the longest snapshots that fit."""
        disk.touch(block for node in path for block in node.blocks.values())
        lost: set[tuple[str, bool]] = set()
        for node in path:
            # What is behind a damaged block has to be computed, and is then written again.
            self._forget(node, lost & node.blocks.keys())
            columns = [key for key in node.blocks if not key[1]]
            if not all([self._read(disk, node, key, path) for key in columns]):  # noqa: C419
                lost.update(key for key in columns if key not in node.blocks)
                if not lost:
                    break
        done = set()
        for node in reversed(path):
            for key, block in list(node.blocks.items()):
                fits = node.end == whole if block.record.exact else node.end <= most
                wanted = key[1] and key not in done and node.end <= matched and fits
                if wanted and self._read(disk, node, key, path):
                    done.add(key)

    def _adopt(self, disk: Directory, blocks: Sequence[Block]) -> None:
        """Add the blocks of an earlier process, whose parts are read with their first hit."""
        roots = [self._root(tenant) for tenant in {block.record.tenant for block in blocks}]
        ends = {root.text.hexdigest(): root for root in roots}
        nodes: dict[Block, Node] = {}

        def rank(block: Block) -> tuple[bool, int, int]:
            return block.record.snapshot, block.record.begin, len(block.record.tokens)

        for block in sorted(blocks, key=rank):
            record, parent = block.record, ends.get(block.record.before)
            key = record.name, record.snapshot
            path = [] if parent is None or not record.tokens else self._grow(record.tokens, parent)
            ends |= {node.text.hexdigest(): node for node in path}
            if not path or (len(path) > 1 and not record.snapshot) or key in path[-1].blocks:
                disk.remove(block)  # of a text whose beginning is gone, or that was split since
                continue
            path[-1].blocks[key] = block
            nodes[block] = path[-1]
            self.lags.setdefault(record.name, record.lag)
        for block in blocks:
            if block in nodes:
                self._touch(_path(nodes[block]))

    def _match(self, text: Sequence[int], node: Node) -> tuple[list[Node], int]:
        """Return the nodes along the beginning of a text, and how many of its tokens they share;
        the last node may have more. node: the one whose end the text continues from."""
        path: list[Node] = []
        matched = 0
        start = node.end
        while matched == node.end - start and matched < len(text):
            if (child := node.children.get(text[matched])) is None:
                break
            node = child
            path.append(node)
            matched += common(node.tokens, text, matched)
        return path, matched

    def _grow(self, text: Sequence[int], node: Node) -> list[Node]:
        """Return the nodes of a text, the last of which ends with it, after adding what lacks."""
        path, matched = self._match(text, node)
        start = node.end
        if path and start + matched < path[-1].end:
            path[-1] = self._split(path[-1], start + matched)
        while matched < len(text):
            node = path[-1] if path else node
            most = len(text) if self.disk is None else STRETCH - node.end % STRETCH
            path.append(self._add(Node(node, node.end, text[matched : matched + most])))
            matched += most
        self._touch(path)
        return path

    def _touch(self, path: Sequence[Node]) -> None:
        """Make these nodes, parents first, the most recently used ones."""
        self._recent = path
        for node in reversed(path):
            self._order.move_to_end(node)

    def _add(self, node: Node) -> Node:
        assert node.parent is not None
        node.parent.children[node.tokens[0]] = node
        if node.parent.parent is None:
            self._roots[node.tenant] = node.parent
        self._order[node] = None
        return node

    def _remove(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        del node.parent.children[node.tokens[0]]
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.tenant]
        del self._order[node]
        self.nbytes -= node.nbytes

    def _split(self, node: Node, at: int) -> Node:
        """Return a new parent of a node, which then begins at `at`."""
        stored = [key for key in node.blocks if not key[1]]
        if self.disk is not None:
            for key in stored:
                self._read(self.disk, node, key, [node])
        old = {key: node.blocks.pop(key) for key in stored if key in node.blocks}
        count = at - node.begin
        upper = Node(node.parent, node.begin, node.tokens[:count])
        for name, part in node.columns.items():
            first, end = node.span(self.lags[name], at)
            upper.columns[name] = owned_slice(array[:, :, : end - first] for array in part.arrays)
            node.columns[name] = owned_slice(array[:, :, end - first :] for array in part.arrays)
        node.begin, node.tokens, node.parent = at, node.tokens[count:], upper
        self._add(upper)
        upper.children[node.tokens[0]] = node
        self._recent = [upper, node]
        for each in (upper, node):
            for name, part in each.columns.items():
                self._store(each, name, part)
        if self.disk is not None:
            for block in old.values():
                self.disk.remove(block)
        return upper


def _path(node: Node) -> list[Node]:
    """Return the nodes of the text that ends with one."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def owned(views: Iterable[mx.array]) -> Arrays:
    """Return computed copies of views, which share no memory with other arrays."""
    arrays = tuple(mx.contiguous(view) for view in views)
    mx.eval(arrays)
    return arrays


def owned_slice(views: Iterable[mx.array]) -> KVSlice:
    """Return computed copies of views of keys and values."""
    arrays = owned(views)
    return KVSlice(arrays[0].shape[2], arrays)


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
