"""Opening of a pair's prompt cache, in memory and in a directory, and digests of models, which show
to which models the blocks on disk belong."""

import hashlib
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from .. import system
from ..errors import OptionError
from ..models.base import Base, fingerprint
from ..types import TARGET, Reusable
from ..version import __version__
from .pair import Pair
from .prompt_cache import PromptCache
from .prompt_cache_disk import Directory

LAYOUT = "4"
"""Version of the cached arrays. It is a part of the digests, so that blocks of other versions are
not read."""
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
        """Open the cache of a pair, with all blocks on disk that belong to the pair's models.

        Returns:
            The cache, or None if `max_bytes` is 0.
        Raises:
            OptionError: If the directory cannot be used, or the target's state cannot be stored."""
        if self.max_bytes == 0:
            return None
        if self.directory is None:
            return PromptCache(self.memory_bytes)
        computed = _computed(pair.target)
        if not pair.target.rows_agree or (computed.positions is None and computed.snapshot is None):
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
    """Return, by name, digests of everything but the tokens that cached arrays depend on."""
    models = {TARGET: _of_model(pair.target)}
    if pair.draft is not None:
        models["draft"] = _of_model(pair.draft)
    if (drafter := pair.drafter_network) is not None:
        # The drafter's config.json has settings that its weights do not show.
        settings = f"{' '.join(drafter.hidden)}, {drafter.sizes}"
        models[drafter.kind] = f"{fingerprint(drafter)} of {settings}"
    versions = LAYOUT, __version__, version("mlx"), version("mlx-lm")
    # A drafter's state depends on the target's hidden states, and so on the target.
    parts = {name: repr((models[TARGET], digest, versions)) for name, digest in models.items()}
    return {name: hashlib.blake2b(part.encode()).hexdigest() for name, part in parts.items()}


def _of_model(model: Base) -> str:
    """Return a digest of a model's weights and identity, and of the layout of its cache arrays."""
    positions = _computed(model).positions
    layout = [f"{array.shape} {array.dtype}" for array in (positions(0, 1) if positions else ())]
    rest = hashlib.blake2b(repr((model.identity, layout)).encode(), digest_size=16).hexdigest()
    return fingerprint(model.network) + rest


def _computed(model: Base) -> Reusable:
    """Return the reusable state of a sequence of one token. It is lazy: only shapes are needed."""
    context = model.open([0])
    context.advance(mx.zeros((1, 1), dtype=mx.int32))
    return context.snapshot(0)
