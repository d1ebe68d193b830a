"""Where the prompt cache of a pair comes from and where it goes: to memory alone, or to a file."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import __version__
from ..checkpoints.disk.sizes import memory
from ..errors import OptionError
from ..kept import TARGET, Memory
from . import file as files
from .cache import PromptCache

if TYPE_CHECKING:
    from ..models.base import Base
    from ..pair import Pair

SHARE = 1 / 8
MOST = 8 << 30
"""Of the machine's memory, and in bytes: what a cache takes at most unless it is told."""
SAMPLED = 64
"""Numbers of each array of weights that tell one model from another."""


def default_bytes() -> int:
    """The bound of a cache that nobody has given one."""
    return min(MOST, int(SHARE * memory()))


@dataclass(frozen=True)
class Store:
    """max_bytes: of what is kept; None is the default and 0 keeps nothing. file: None keeps it in
    memory alone.

    Raises OptionError for a file that is there and no prompt cache.
    """

    max_bytes: int | None = None
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            files.metadata_of(self.file)

    def open(self, pair: Pair) -> PromptCache | None:
        """The cache of a pair, with what the file has of it; None where nothing is to be kept.

        Raises OptionError for a file of another target, or a damaged one, and where a target has
        nothing that a file can hold. Warns of one that another version has written, which is
        written anew.
        """
        if self.max_bytes == 0:
            return None
        cache = PromptCache(default_bytes() if self.max_bytes is None else self.max_bytes)
        if self.file is not None and not pair.target.rows_agree:
            raise OptionError(
                f"nothing of a prompt can be kept for {pair.name}, which gives several "
                "tokens at once other scores than one after the other: leave "
                "--prompt-cache-file out"
            )
        if self.file is not None and not _fits_files(_memory(pair.target)):
            raise OptionError(
                f"{pair.name} has windows or recurrent state, which a prompt cache keeps in memory "
                "alone: leave --prompt-cache-file out"
            )
        if self.file is None or not self.file.exists():
            return cache
        told, own = files.metadata_of(self.file), _metadata(pair)
        if told.get("layout") != files.LAYOUT or told.get("made_by") != own["made_by"]:
            warnings.warn(
                f"{self.file} was written by {told.get('made_by', 'another version')}, and this "
                f"is {own['made_by']}: it is written anew",
                RuntimeWarning,
                stacklevel=2,
            )
            cache.changed = True
            return cache
        there, here = files.models_in(told, self.file), files.models_in(own, self.file)
        if there.get(TARGET) != here[TARGET]:
            raise OptionError(
                f"{self.file} was made for another model than {pair.name}, or for other weights, "
                "another config.json, adapter, device or flags of it: choose another "
                "--prompt-cache-file"
            )
        files.fill(cache, self.file, [name for name in here if there.get(name) == here[name]])
        return cache

    def close(self, cache: PromptCache, pair: Pair) -> None:
        """Write the file, if something is new. Raises OutputError."""
        if self.file is not None and cache.changed:
            files.write(cache, self.file, _metadata(pair))
            cache.changed = False


def _metadata(pair: Pair) -> dict[str, str]:
    models = {TARGET: _of_model(pair.target)}
    if pair.draft is not None:
        models["draft"] = _of_model(pair.draft)
    if pair.speculator is not None:
        # What stands in its config.json alone, no weight tells.
        told = f"{' '.join(pair.speculator.taps)}, {pair.speculator.sizes}"
        models[pair.speculator.kind] = f"{fingerprint(pair.speculator)} of {told}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    return {"models": json.dumps(models), "made_by": f"mlx-specdec {__version__}, {versions}"}


def _of_model(model: Base) -> str:
    """Of its weights, of what else its passes depend on, and of the arrays of its caches."""
    own = _memory(model)
    arrays = own.columns(0, 1) if own.columns is not None else ()
    layout = [f"{array.shape} {array.dtype}" for array in arrays]
    rest = hashlib.blake2b(repr((model.identity, layout)).encode(), digest_size=16).hexdigest()
    return fingerprint(model.network) + rest


def _memory(model: Base) -> Memory:
    """Of one token. Nothing is computed: shapes are known as soon as the graph is built."""
    context = model.open([0])
    context.advance(mx.zeros((1, 1), dtype=mx.int32))
    return context.memory(0)


def _fits_files(memory: Memory) -> bool:
    return memory.columns is not None or (memory.whole is not None and memory.whole.value is None)


def fingerprint(network: nn.Module) -> str:
    """Tells weights apart by some numbers of every array, without reading them all."""
    digest = hashlib.blake2b(digest_size=16)
    weights = sorted(tree_flatten(network.parameters()))
    samples = [_sample(array) for _, array in weights]
    mx.eval(samples)
    for (name, array), sample in zip(weights, samples, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype} {sample.tolist()}".encode())
    return digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    last = array.size - 1
    places = [last * place // (SAMPLED - 1) for place in range(SAMPLED)]
    return mx.take(array, mx.array(places, dtype=mx.int64))
