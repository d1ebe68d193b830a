"""The prompt cache: a radix tree over token ids. A node holds keys, values and snapshots for its
segment of a sequence, in arrays that it does not share."""

from __future__ import annotations

import hashlib
from array import array as numbers
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import mlx.core as mx

from ..types import TARGET, Cached, Reusable
from .prompt_cache_disk import Directory, DiskBlock, Record, nbytes_of

Arrays = tuple[mx.array, ...]
COMPARED_AT_ONCE = 1024
"""Number of tokens that are compared at once."""
STRETCH = 256
"""The most tokens in a node if there is a cache on disk, and so in a block on disk."""
SHARED_PREFIX = 256
"""If prompts share this many tokens that are not cached, one of them is prefilled first."""


class Node:
    """A segment of tokens that continues the sequence of the parent.

    Attributes:
        positions, snapshots: Keys and values, and snapshots at the node's end, in memory, by name.
        blocks: Blocks on disk, by name and by whether they are snapshots.
        text: The running digest of the tenant and of the sequence up to the node's end."""

    def __init__(
        self, parent: Node | None, begin: int, tokens: Sequence[int], tenant: str = ""
    ) -> None:
        self.parent = parent
        self.tenant: str = tenant if parent is None else parent.tenant
        self.begin = begin
        self.tokens = list(tokens)
        self.children: dict[int, Node] = {}
        self.positions: dict[str, Cached] = {}
        self.snapshots: dict[str, Cached] = {}
        self.blocks: dict[tuple[str, bool], DiskBlock] = {}
        root = hashlib.blake2b(tenant.encode(), digest_size=32)
        self.text: hashlib.blake2b = root if parent is None else parent.text.copy()
        self.text.update(numbers("q", self.tokens).tobytes())

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def is_empty(self) -> bool:
        return not (self.positions or self.snapshots or self.children or self.blocks)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.positions.values(), *self.snapshots.values()))

    def span(self, lag: int, end: int | None = None) -> tuple[int, int]:
        """Return the first one, and the end, of the positions that become final with the node's
        tokens before `end`. A position belongs to one token, and is final once `lag` later tokens
        are known."""
        return max(0, self.begin - lag), max(0, (self.end if end is None else end) - lag)


class PromptCache:
    """A prefix cache for `stream_generate`: the KV caches of earlier sequences of one pair. Each
    tenant has a separate tree, because the speed of a hit would reveal prompts of other tenants.

    Attributes:
        max_bytes: Limit of the cache's bytes in memory.
        nbytes: The cache's bytes in memory.
        disk: A directory with blocks of all nodes, which need not fit into memory.
        lags: The number of later tokens that each position depends on, by name."""

    def __init__(self, max_bytes: int, disk: Directory | None = None) -> None:
        self.max_bytes = max_bytes
        self.disk = disk
        self._order: OrderedDict[Node, None] = OrderedDict()
        self.clear()
        if disk is not None:
            self._adopt(disk, disk.blocks())

    def close(self) -> None:
        """Wait until all blocks are on disk."""
        if self.disk is not None:
            self.disk.close()

    def clear(self) -> None:
        """Forget all states, also those on the disk."""
        if self.disk is not None:
            for node in self._order:
                self._forget(node)
        self.nbytes = 0
        self.lags: dict[str, int] = {}
        self._roots: dict[str, Node] = {}
        # Nodes from the least to the most recently used one. A parent comes after its children.
        self._order = OrderedDict()
        self._recent: Sequence[Node] = ()

    @property
    def texts(self) -> Iterator[list[int]]:
        """The cached sequences, from the least to the most recently used one."""
        for leaf in [node for node in self._order if not node.children]:
            yield [token for node in _path(leaf) for token in node.tokens]

    def find(
        self, prompt: Sequence[int], most: int, needs: Sequence[str] = (), tenant: str = ""
    ) -> dict[str, Cached]:
        """Return the cached state, by name, of at most `most` tokens of a prompt. For all of
        these tokens, the positions of the names in `needs` must be cached as well."""
        path, matched = self._match(prompt, self._root(tenant))
        if self.disk is not None:
            self._recall(self.disk, path, matched, most, len(prompt))

        def positions(name: str) -> int:
            """Return the number of positions from the beginning up to the first gap."""
            filled = list(takewhile(lambda node: name in node.positions, path))
            end = min(filled[-1].end, matched) if filled else 0
            return max(0, end - self.lags.get(name, 0))

        def take(name: str, most: int) -> Cached | None:
            """Return the cached state of at most `most` tokens, or None if there is none."""
            count = min(most, positions(name))
            if count > 0:
                return Cached(count, self._joined(path, name, count))
            for node in reversed(path):
                snapshot = node.snapshots.get(name)
                if snapshot is None or node.end > matched:
                    continue
                count = snapshot.length
                if count == len(prompt) if snapshot.exact else count <= most:
                    return snapshot
            return None

        target = take(TARGET, min([most, *map(positions, needs)]))
        if target is None:
            return {}
        self._touch(path)
        names = {name for node in path for name in (*node.positions, *node.snapshots)} - {TARGET}
        cached = 0 if target.exact else target.length
        others = {name: part for name in sorted(names) if (part := take(name, cached))}
        return {TARGET: target, **others}

    def waits(self, prompt: Sequence[int], earlier: Sequence[int], tenant: str = "") -> bool:
        """Return whether a prompt should wait for the prefill of an earlier one of its tenant,
        because they share many tokens that are not cached."""
        return common(earlier, prompt) >= self._match(prompt, self._root(tenant))[1] + SHARED_PREFIX

    def keep(
        self,
        prompt: Sequence[int],
        committed: Sequence[int],
        computed: Mapping[str, Reusable],
        tenant: str = "",
    ) -> None:
        """Add the state of a sequence, by name. The newest committed token need not be in the KV
        cache. If this fails, clear the cache, because a part of the state may have been added."""
        root = self._root(tenant)
        try:
            for name, state in computed.items():
                if state.snapshot is not None:
                    text = prompt if state.snapshot.exact else committed
                    self._keep_snapshot(root, text[: state.snapshot.length], name, state.snapshot)
                else:
                    end = min(state.length + state.lag, len(committed) - 1)
                    self._keep_columns(root, committed[:end], name, state)
        except BaseException:
            self.clear()
            raise

    def put(self, node: Node, name: str, value: Cached) -> None:
        """Add keys and values or a snapshot to a node that lacks them, and write them to disk."""
        parts = node.snapshots if value.is_snapshot else node.positions
        parts[name] = value
        self.nbytes += value.nbytes
        self._store(node, name, value)

    def _root(self, tenant: str) -> Node:
        return self._roots.get(tenant) or Node(None, 0, (), tenant)

    def _keep_snapshot(self, root: Node, text: Sequence[int], name: str, snapshot: Cached) -> None:
        if snapshot.nbytes > self.max_bytes:
            return
        path = self._grow(text, root)
        if name not in path[-1].snapshots and self._make_room(snapshot.nbytes, path):
            # Copy the arrays: views would keep the arrays of the complete batch in memory.
            self.put(path[-1], name, replace(snapshot, arrays=owned(snapshot.arrays)))

    def _keep_columns(self, root: Node, text: Sequence[int], name: str, computed: Reusable) -> None:
        positions, lag = computed.positions, computed.lag
        count = len(text) - lag
        if positions is None or count < 1 or _nbytes(positions(0, count)) > self.max_bytes:
            return
        self.lags[name] = lag
        path = self._grow(text, root)
        lacking = {node: positions(*node.span(lag)) for node in path if name not in node.positions}
        if self._make_room(sum(map(_nbytes, lacking.values())), path):
            for node, views in lacking.items():
                self.put(node, name, owned_slice(views))

    def _joined(self, path: Sequence[Node], name: str, count: int) -> Arrays:
        """Return the first `count` positions of a path in contiguous arrays."""
        segments = []
        for node in path:
            first, end = node.span(self.lags[name])
            if first < count:
                part = slice(0, min(end, count) - first)
                segments.append([array[:, :, part] for array in node.positions[name].arrays])
        return tuple(mx.concatenate(list(parts), axis=2) for parts in zip(*segments, strict=True))

    def _make_room(self, nbytes: int, path: Sequence[Node]) -> bool:
        """Remove the least recently used nodes until `nbytes` more bytes fit. Nodes on the path
        stay. If the bytes do not fit, remove empty nodes at the path's end and return False."""
        while self.nbytes + nbytes > self.max_bytes:
            removable = (n for n in self._order if n.positions or n.snapshots or n.is_empty)
            oldest = next(removable, None)
            if oldest is None or oldest in path:
                for node in takewhile(lambda node: node.is_empty, reversed(path)):
                    self._remove(node)
                return False
            for block in oldest.blocks.values():
                block.written.wait()  # until then the block refers to the same arrays
            self.nbytes -= oldest.nbytes
            oldest.positions, oldest.snapshots = {}, {}
            if oldest.is_empty:
                self._remove(oldest)
        return True

    def _store(self, node: Node, name: str, value: Cached) -> None:
        """Write the positions or a snapshot of a node to disk, unless they are there or do not
        fit."""
        disk, is_snapshot = self.disk, value.is_snapshot
        if disk is None or name not in disk.models or (name, is_snapshot) in node.blocks:
            return
        # Earlier nodes may have no blocks, so the block of a snapshot records all tokens.
        path = _path(node) if is_snapshot else [node]
        tokens = [token for step in path for token in step.tokens]
        assert path[0].parent is not None
        at = path[0].parent.text.hexdigest(), path[0].begin, tokens
        lag = 0 if is_snapshot else self.lags[name]
        record = Record(
            name, disk.models[name], *at, lag, is_snapshot, value.description, node.tenant
        )
        size = nbytes_of(record, value)
        while disk.nbytes + size > disk.max_bytes:
            if disk.remove_other():
                continue
            oldest = next((stored for stored in self._order if stored.blocks), None)
            if oldest is None or oldest in self._recent:
                return
            self._forget(oldest)
            if oldest.is_empty:
                self._remove(oldest)
        node.blocks[name, is_snapshot] = disk.write(record, value)

    def _forget(self, node: Node, names: Iterable[tuple[str, bool]] | None = None) -> None:
        """Remove blocks of a node from the disk, by default all of them."""
        assert self.disk is not None
        for key in list(node.blocks if names is None else names):
            self.disk.remove(node.blocks.pop(key))

    def _read(self, disk: Directory, node: Node, key: tuple[str, bool], path: list[Node]) -> bool:
        """Read a block of a node into memory, without removing nodes on the path. Return False if
        the block is damaged or does not fit."""
        name, is_snapshot = key
        if name in (node.snapshots if is_snapshot else node.positions):
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
        self, disk: Directory, path: list[Node], matched: int, most: int, length: int
    ) -> None:
        """Read blocks of a path that are not in memory: positions, and the longest usable
        snapshots. These have `length` tokens (the prompt's number) if they are exact, else at most
        `most`. The path and the prompt share `matched` tokens."""
        disk.touch(block for node in path for block in node.blocks.values())
        lost: set[tuple[str, bool]] = set()
        for node in path:
            # Columns after a damaged block cannot be used. They are computed and written again.
            self._forget(node, lost & node.blocks.keys())
            positions = [key for key in node.blocks if not key[1]]
            if not all([self._read(disk, node, key, path) for key in positions]):  # noqa: C419
                lost.update(key for key in positions if key not in node.blocks)
                if not lost:
                    break
        done = set()
        for node in reversed(path):
            for key, block in list(node.blocks.items()):
                fits = node.end == length if block.record.exact else node.end <= most
                wanted = key[1] and key not in done and node.end <= matched and fits
                if wanted and self._read(disk, node, key, path):
                    done.add(key)

    def _adopt(self, disk: Directory, blocks: Sequence[DiskBlock]) -> None:
        """Add nodes for the blocks of an earlier process. A block is read at its first hit."""
        roots = [self._root(tenant) for tenant in {block.record.tenant for block in blocks}]
        ends = {root.text.hexdigest(): root for root in roots}
        nodes: dict[DiskBlock, Node] = {}
        records = [(block.record, block) for block in blocks]
        order = sorted(records, key=lambda r: (r[0].snapshot, r[0].begin, len(r[0].tokens)))
        for record, block in order:
            parent = ends.get(record.before)
            key = record.name, record.snapshot
            path = [] if parent is None or not record.tokens else self._grow(record.tokens, parent)
            ends |= {node.text.hexdigest(): node for node in path}
            if not path or (len(path) > 1 and not record.snapshot) or key in path[-1].blocks:
                disk.remove(block)  # earlier blocks of its sequence are missing, or it was split
                continue
            path[-1].blocks[key] = block
            nodes[block] = path[-1]
            self.lags.setdefault(record.name, record.lag)
        for block in blocks:
            if block in nodes:
                self._touch(_path(nodes[block]))

    def _match(self, text: Sequence[int], node: Node) -> tuple[list[Node], int]:
        """Return the nodes along the longest cached beginning of a sequence that continues `node`,
        and its number of tokens. The last node may have further tokens."""
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
        """Return the nodes of a sequence that continues `node`, after adding missing nodes. The
        last node ends where the sequence ends."""
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
        """Mark these nodes, parents first, as the most recently used ones."""
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
        """Split a node at position `at`, and return the new parent, which has the tokens before
        it."""
        stored = [key for key in node.blocks if not key[1]]
        if self.disk is not None:
            for key in stored:
                self._read(self.disk, node, key, [node])
        old = {key: node.blocks.pop(key) for key in stored if key in node.blocks}
        count = at - node.begin
        upper = Node(node.parent, node.begin, node.tokens[:count])
        for name, part in node.positions.items():
            first, end = node.span(self.lags[name], at)
            upper.positions[name] = owned_slice(array[:, :, : end - first] for array in part.arrays)
            node.positions[name] = owned_slice(array[:, :, end - first :] for array in part.arrays)
        node.begin, node.tokens, node.parent = at, node.tokens[count:], upper
        self._add(upper)
        upper.children[node.tokens[0]] = node
        self._recent = [upper, node]
        for half in (upper, node):
            for name, part in half.positions.items():
                self._store(half, name, part)
        if self.disk is not None:
            for block in old.values():
                self.disk.remove(block)
        return upper


def _path(node: Node) -> list[Node]:
    """Return the nodes from the root's child to `node`."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def owned(views: Iterable[mx.array]) -> Arrays:
    """Return evaluated copies of views that share no memory with other arrays."""
    arrays = tuple(mx.contiguous(view) for view in views)
    mx.eval(arrays)
    return arrays


def owned_slice(views: Iterable[mx.array]) -> Cached:
    """Return computed copies of views of keys and values."""
    arrays = owned(views)
    return Cached(arrays[0].shape[2], arrays)


def common(tokens: Sequence[int], text: Sequence[int], begin: int = 0) -> int:
    """Return how many of `tokens` equal the tokens of `text` from position `begin` on."""
    most = min(len(tokens), len(text) - begin)
    # Python compares whole lists 20 times as fast as their elements one by one.
    for at in range(0, most, COMPARED_AT_ONCE):
        end = min(at + COMPARED_AT_ONCE, most)
        if list(tokens[at:end]) != list(text[begin + at : begin + end]):
            return next(place for place in range(at, end) if tokens[place] != text[begin + place])
    return max(0, most)


def _nbytes(arrays: Sequence[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)
