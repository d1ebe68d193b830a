"""The prompt cache: the state of earlier sequences, in parts for blocks of tokens. A block begins
at a multiple of BLOCK_TOKENS, and a digest of all tokens before it finds its parts."""

from __future__ import annotations

import hashlib
import shutil
from array import array as numbers
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .. import system
from ..errors import OptionError
from ..models.base import fingerprint
from ..types import TARGET, Cached, Reusable
from .pair import Pair
from .prompt_cache_files import Directory, Part

BLOCK_TOKENS = 256
"""The most tokens of a part. Sequences that differ within a block share no part of it, so that up
to this many tokens are stored twice."""
SHARED_PREFIX = 256
"""If prompts share this many tokens that are not cached, one of them is prefilled first."""


class Block(NamedTuple):
    """A block of a sequence. before: A digest of the tenant and of the tokens before the block."""

    begin: int
    before: str
    tokens: list[int]


class PromptCache:
    """A prefix cache for `stream_generate`: the KV caches of earlier sequences of one pair. Each
    tenant has separate entries, because the speed of a hit would reveal prompts of other tenants.

    Args:
        max_bytes: Limit of the cache's bytes in memory. `nbytes` are its bytes there.
        disk: A directory that holds all parts, which need not fit into memory."""

    def __init__(self, max_bytes: int, disk: Directory | None = None) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._disk = disk
        # Without a directory, the name of a state is enough to identify a model of the pair.
        self._models = {TARGET: TARGET} if disk is None else dict(disk.models)
        # All parts, from the least to the most recently used one, and the parts of one model whose
        # blocks follow the same tokens.
        self._parts: OrderedDict[Part, None] = OrderedDict()
        self._following: defaultdict[tuple[str, str], list[Part]] = defaultdict(list)
        for part in () if disk is None else disk.stored():
            self._enter(part)

    @property
    def sequences(self) -> Iterator[list[int]]:
        """The cached blocks of the target's sequences, from the least recently used one."""
        target = self._models[TARGET]
        return (part.tokens for part in list(self._parts) if part.model == target)

    def close(self) -> None:
        """Wait until all parts are on disk."""
        if self._disk is not None:
            self._disk.close()

    def clear(self) -> None:
        """Forget all states of the pair, also those on the disk."""
        for part in [part for part in self._parts if part.model in self._models.values()]:
            self._remove(part)

    def find(
        self, prompt: Sequence[int], most: int, needs: Sequence[str] = (), tenant: str = ""
    ) -> dict[str, Cached]:
        """Return the cached state, by name, of at most `most` tokens of a prompt. For all of
        these tokens, the positions of the names in `needs` must be cached as well."""
        blocks = _blocks(prompt, tenant)
        used: list[Part] = []
        # The target comes first, because no other state is of use without its state.
        names = sorted({*self._models, *needs}, key=lambda name: (name != TARGET, name))
        positions = {name: self._positions(name, blocks, used) for name in names}

        def take(name: str, most: int) -> Cached | None:
            """Return the cached state of at most `most` tokens, or None if there is none."""
            state = positions[name]
            if not state.length:
                return self._snapshot(name, blocks, len(prompt), most, used)
            count = min(most, state.length)
            cut = tuple(array[:, :, :count] for array in state.arrays)
            return Cached(count, cut) if count > 0 else None

        target = take(TARGET, min([most, *(positions[name].length for name in needs)]))
        if target is None:
            return {}
        cached = 0 if target.exact else target.length
        others = {name: state for name in names[1:] if (state := take(name, cached))}
        self._touch(used)
        return {TARGET: target, **others}

    def waits(self, prompt: Sequence[int], earlier: Sequence[int], tenant: str = "") -> bool:
        """Return whether a prompt should wait for the prefill of an earlier one of its tenant,
        because they share many tokens that are not cached."""
        new = common(earlier, prompt) - SHARED_PREFIX
        if new < 0:
            return False
        matches = self._matches(TARGET, _blocks(prompt, tenant))
        return new >= sum(matched for _, _, matched in matches)

    def keep(
        self,
        prompt: Sequence[int],
        committed: Sequence[int],
        computed: Mapping[str, Reusable],
        tenant: str = "",
    ) -> None:
        """Add the state of a sequence, by name, as far as it fits. The newest committed token need
        not be in the KV cache. If this fails, clear the cache, because a part of the state may have
        been added."""
        try:
            for name, state in computed.items():
                snapshot, used = state.snapshot, list[Part]()
                if snapshot is not None:
                    text = prompt if snapshot.exact else committed
                    blocks = _blocks(text[: snapshot.length], tenant)[-1:]
                else:
                    end = min(state.length + state.lag, len(committed) - 1)
                    blocks = _blocks(committed[:end] if end > state.lag else (), tenant)
                for block in blocks:
                    if (part := self._kept(name, block, state, used)) is None:
                        break
                    used.append(part)
                self._touch(used)
        except BaseException:
            self.clear()
            raise

    def _kept(self, name: str, block: Block, state: Reusable, used: Sequence[Part]) -> Part | None:
        """Return the part of a block, which is added unless it is cached. Return None if it does
        not fit."""
        model, tokens, value = self._models.setdefault(name, name), block.tokens, state.snapshot
        parts = self._after(model, block, snapshots=value is not None)
        for part in parts:
            if part.tokens == tokens or (value is None and part.tokens[: len(tokens)] == tokens):
                return part
        replaced: list[Part] = []
        if value is None:
            assert state.positions is not None
            first, end = max(0, block.begin - state.lag), block.begin + len(tokens) - state.lag
            value = Cached(end - first, state.positions(first, end))
            replaced = [part for part in parts if tokens[: len(part.tokens)] == part.tokens]
        part = Part(model, block.before, tokens, state.lag, replace(value, arrays=()))
        if not self._make_room(self, value.nbytes, used):
            return None
        for shorter in replaced:
            if shorter in self._parts:
                self._remove(shorter)
        # Copy the arrays: views would keep the arrays of the complete batch in memory.
        value = replace(value, arrays=tuple(map(mx.contiguous, value.arrays)))
        mx.eval(value.arrays)
        part.value = value
        self.nbytes += value.nbytes
        self._enter(part)
        disk = self._disk
        if disk is not None and self._make_room(disk, disk.size(part, value), used):
            disk.add(part, value)
        return part

    def _enter(self, part: Part) -> None:
        self._parts[part] = None
        self._following[part.model, part.before].append(part)

    def _make_room(
        self, place: PromptCache | Directory, nbytes: int, in_use: Sequence[Part]
    ) -> bool:
        """Make room for `nbytes` in memory or in the directory. Remove the least recently used
        parts that are not in use. Return False if there cannot be room."""
        if nbytes > place.max_bytes:
            return False
        for part in list(self._parts) if place.nbytes + nbytes > place.max_bytes else ():
            if place.nbytes + nbytes > place.max_bytes and part not in in_use:
                self._remove(part, place)
        return place.nbytes + nbytes <= place.max_bytes

    def _remove(self, part: Part, place: PromptCache | Directory | None = None) -> None:
        """Remove a part from a place, None for all places."""
        if part.value is not None and place in (None, self):
            if part.file is not None:
                wait([part.file])  # until then the writer needs the arrays
            self.nbytes -= part.value.nbytes
            part.value = None
        if part.file is not None and self._disk is not None and place in (None, self._disk):
            self._disk.remove(part)
        if part.value is None and part.file is None:
            del self._parts[part]
            key = part.model, part.before
            self._following[key].remove(part)
            if not self._following[key]:
                del self._following[key]

    def _after(self, model: str, block: Block, *, snapshots: bool) -> list[Part]:
        """Return a model's snapshots, or its keys and values, after the tokens before a block."""
        parts = self._following.get((model, block.before), [])
        return [part for part in parts if part.state.is_snapshot == snapshots]

    def _matches(self, name: str, blocks: Sequence[Block]) -> Iterator[tuple[Block, Part, int]]:
        """Yield the keys and values of the longest cached prefix of a sequence: each block with its
        part, and the number of tokens that both have in common."""
        for block in blocks:
            parts = self._after(self._models.get(name, name), block, snapshots=False)
            matches = [(common(part.tokens, block.tokens), part) for part in parts]
            matched, part = max(matches, key=lambda match: match[0], default=(0, None))
            if part is not None and matched:
                yield block, part, matched
            if matched < BLOCK_TOKENS:
                return

    def _positions(self, name: str, blocks: Sequence[Block], used: list[Part]) -> Cached:
        """Return the keys and values of the longest cached prefix of a sequence, of length 0 if
        there is none. Add their parts to `used`."""
        values: list[Cached] = []
        count = 0
        for block, part, matched in self._matches(name, blocks):
            if (value := self._load(part, used)) is None:
                break
            values.append(value)
            count = block.begin + matched - part.lag
        arrays = zip(*(value.arrays for value in values), strict=True)
        return Cached(max(0, count), tuple(mx.concatenate(list(each), axis=2) for each in arrays))

    def _snapshot(
        self, name: str, blocks: Sequence[Block], length: int, most: int, used: list[Part]
    ) -> Cached | None:
        """Return the longest snapshot of a beginning of a prompt of `length` tokens, or None. An
        exact snapshot has all tokens of the prompt, and another snapshot at most `most` tokens."""
        for block in reversed(blocks):
            parts = self._after(self._models.get(name, name), block, snapshots=True)
            for part in sorted(parts, key=lambda part: -len(part.tokens)):
                state, tokens = part.state, block.tokens[: len(part.tokens)]
                fits = state.length == length if state.exact else state.length <= most
                if fits and tokens == part.tokens and (value := self._load(part, used)):
                    return value
        return None

    def _load(self, part: Part, used: list[Part]) -> Cached | None:
        """Return a part's state, and add the part to `used`. Return None if the part is on disk and
        is damaged, or does not fit into memory with the parts in use."""
        if part.value is None and self._disk is not None:
            value = self._disk.read(part)
            if value is None:
                self._remove(part, self._disk)
            elif self._make_room(self, value.nbytes, used):
                part.value = value
                self.nbytes += value.nbytes
        if part.value is not None:
            used.append(part)
        return part.value

    def _touch(self, parts: Sequence[Part]) -> None:
        """Mark these parts of a sequence as the most recently used ones, the first one last."""
        for part in reversed(parts):
            if part in self._parts:
                self._parts.move_to_end(part)
            if part.file is not None and self._disk is not None:
                self._disk.touch(part)


def _blocks(text: Sequence[int], tenant: str) -> list[Block]:
    """Return the blocks of a tenant's sequence."""
    digest = hashlib.blake2b(hashlib.blake2b(tenant.encode()).digest(), digest_size=32)
    blocks = []
    for begin in range(0, len(text), BLOCK_TOKENS):
        blocks.append(Block(begin, digest.hexdigest(), list(text[begin : begin + BLOCK_TOKENS])))
        digest.update(numbers("q", blocks[-1].tokens).tobytes())
    return blocks


def common(tokens: Sequence[int], text: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    return sum(takewhile(bool, map(eq, tokens, text)))


MEMORY_SHARE, MOST_IN_MEMORY = 1 / 8, 8 << 30
"""The default limit of a cache in memory: this share of the machine's memory, and at most this many
bytes."""
DISK_SHARE, MOST_ON_DISK = 1 / 4, 32 << 30
"""The limit of a directory: this share of the free disk space, and at most this many
bytes."""


@dataclass(frozen=True)
class Store:
    """Settings of a prompt cache.

    Attributes:
        max_bytes: Limit of the bytes in memory. None is the default, and 0 means no cache.
        directory: Directory of a persistent cache, or None to cache in memory only.
        parts: Number of caches that share these limits equally."""

    max_bytes: int | None = None
    directory: Path | None = None
    parts: int = 1

    @property
    def memory_bytes(self) -> int:
        """The limit of this cache's bytes in memory."""
        default = min(MOST_IN_MEMORY, int(MEMORY_SHARE * system.memory()))
        return (default if self.max_bytes is None else self.max_bytes) // self.parts

    def open(self, pair: Pair) -> PromptCache | None:
        """Open the cache of a pair, with all parts on disk that belong to the pair's models.

        Returns:
            The cache, or None if `max_bytes` is 0.
        Raises:
            OptionError: If the directory cannot be used, or the target's state cannot be stored."""
        if self.max_bytes == 0:
            return None
        if self.directory is None:
            return PromptCache(self.memory_bytes)
        if not pair.target.rows_agree or pair.target.identity is None:
            raise OptionError(
                f"nothing of a prompt can be kept for {pair.name}, which several machines share, "
                "or which gives several tokens at once other scores than one after the other: "
                "leave --prompt-cache-dir out"
            )
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            bound = min(MOST_ON_DISK, int(DISK_SHARE * shutil.disk_usage(self.directory).free))
            files = Directory(self.directory, bound // self.parts, _digests(pair))
            return PromptCache(self.memory_bytes, files)
        except OSError as problem:
            reason = problem.strerror or problem
            raise OptionError(
                f"--prompt-cache-dir: cannot make a directory {self.directory}: {reason}"
            ) from None


def _digests(pair: Pair) -> dict[str, str]:
    """Return, by name, digests of everything but the tokens that cached arrays depend on. All of
    them depend on the target, whose hidden states and encoder others may read."""
    target = f"{fingerprint(pair.target.network)} {pair.target.identity}"
    models = {TARGET: ""}
    if (draft := pair.draft) is not None:
        models["draft"] = f"{fingerprint(draft.network)} {draft.identity}"
    if (drafter := pair.drafter_network) is not None:
        # The drafter's config.json has settings that its weights do not show.
        models[drafter.kind] = f"{fingerprint(drafter)} of {drafter.hidden} {drafter.sizes}"
    named = {name: repr((target, name, model)).encode() for name, model in models.items()}
    return {name: hashlib.blake2b(text, digest_size=32).hexdigest() for name, text in named.items()}
