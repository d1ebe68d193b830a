"""Which prompt cache a pair has, in memory and in a directory, and the digests of the models that
its blocks are of."""

import hashlib
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints import disk
from ..errors import OptionError
from ..interfaces.results import TARGET, Reusable
from ..models.base import Base
from ..version import __version__
from .pair import Pair
from .prompt_cache import PromptCache
from .prompt_cache_disk import Directory

LAYOUT = "3"
"""Version of what models compute; blocks of another one are not read."""
SHARE = 1 / 8
MOST = 8 << 30
"""The default limit of a cache: a share of the machine's memory, and at most so many bytes."""
DISK_SHARE = 1 / 4
MOST_ON_DISK = 32 << 30
"""The default limit of a directory: a share of what is free on disk, and at most so many bytes."""
SAMPLED = 64
"""Numbers of each array of weights that tell one model from another."""


@dataclass(frozen=True)
class Store:
    """Opens the prompt cache of a pair. max_bytes: None is the default, 0 caches nothing.
    directory: None for memory alone. disk_bytes: the limit of the directory, None the default."""

    max_bytes: int | None = None
    directory: Path | None = None
    disk_bytes: int | None = None

    def open(self, pair: Pair) -> PromptCache | None:
        """Return the cache of a pair, with the blocks that fit these very models; None where
        nothing is cached. Raises OptionError for a directory that cannot be used, and for targets
        of which nothing can be kept."""
        if self.max_bytes == 0:
            return None
        default = min(MOST, int(SHARE * disk.memory()))
        max_bytes = default if self.max_bytes is None else self.max_bytes
        if self.directory is None:
            return PromptCache(max_bytes)
        computed = _computed(pair.target)
        if not pair.target.rows_agree or (computed.columns is None and computed.snapshot is None):
            raise OptionError(
                f"nothing of a prompt can be kept for {pair.name}, which several machines share, "
                "or which gives several tokens at once other scores than one after the other: "
                "leave --prompt-cache-dir out"
            )
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            bound = self.disk_bytes
            if bound is None:
                bound = min(MOST_ON_DISK, int(DISK_SHARE * shutil.disk_usage(self.directory).free))
            return PromptCache(max_bytes, Directory(self.directory, bound, _digests(pair)))
        except OSError as problem:
            raise OptionError(f"cannot use --prompt-cache-dir: {problem}") from None


def _digests(pair: Pair) -> dict[str, str]:
    """Return by name the digests of all that parts depend on but the text."""
    models = {TARGET: _of_model(pair.target)}
    if pair.draft is not None:
        models["draft"] = _of_model(pair.draft)
    if (drafter := pair.drafter_network) is not None:
        # Its config.json has settings that no weight shows.
        settings = f"{' '.join(drafter.taps)}, {drafter.sizes}"
        models[drafter.kind] = f"{fingerprint(drafter)} of {settings}"
    versions = LAYOUT, __version__, version("mlx"), version("mlx-lm")
    # A drafter's part depends on the target's hidden states.
    parts = {name: repr((models[TARGET], each, versions)) for name, each in models.items()}
    return {name: hashlib.blake2b(part.encode()).hexdigest() for name, part in parts.items()}


def _of_model(model: Base) -> str:
    """Return a digest of weights, of what else passes depend on, and of the caches' arrays."""
    columns = _computed(model).columns
    layout = [f"{array.shape} {array.dtype}" for array in (columns(0, 1) if columns else ())]
    rest = hashlib.blake2b(repr((model.identity, layout)).encode(), digest_size=16).hexdigest()
    return fingerprint(model.network) + rest


def _computed(model: Base) -> Reusable:
    """Return what a model computes of one token, lazily: only its shapes are needed."""
    context = model.open([0])
    context.advance(mx.zeros((1, 1), dtype=mx.int32))
    return context.reusable(0)


def fingerprint(network: nn.Module) -> str:
    """Return a digest of some numbers of every array of weights, without reading them all."""
    digest = hashlib.blake2b(digest_size=16)
    weights = sorted(tree_flatten(network.parameters()))
    samples = []
    for _, array in weights:
        places = [(array.size - 1) * place // (SAMPLED - 1) for place in range(SAMPLED)]
        samples.append(mx.take(array, mx.array(places, dtype=mx.int64)))
    mx.eval(samples)
    for (name, array), sample in zip(weights, samples, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype} {sample.tolist()}".encode())
    return digest.hexdigest()
