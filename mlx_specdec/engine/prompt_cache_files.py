"""Opening of a pair's prompt cache, in memory and in a directory, and digests of models, which show
to which models the blocks on disk belong."""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from .. import system
from ..errors import OptionError
from ..models.base import fingerprint
from ..types import TARGET
from .pair import Pair
from .prompt_cache import PromptCache
from .prompt_cache_tiers import Directory

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
