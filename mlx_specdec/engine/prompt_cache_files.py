"""A prompt cache on disk: one safetensors file, which takes its place whole or not at all.

Nodes stand in it from the newest to the oldest, so that parents come before their children.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import __version__
from ..checkpoints.disk import memory
from ..errors import OptionError, OutputError, first_line
from ..interfaces.reusable import TARGET, Reusable, Snapshot
from ..process import replacing
from .prompt_cache import Node, PromptCache

if TYPE_CHECKING:
    from ..models.base import Base
    from .pair import Pair


FORMAT = "mlx-specdec prompt cache"
LAYOUT = "2"
"""Of the file and of what models compute; another one is written anew."""
LONGEST_HEADER = 100_000_000
Arrays = dict[str, mx.array]


def metadata_of(file: Path) -> dict[str, str]:
    """What a file says of itself. Raises OptionError for what is no prompt cache."""
    if not file.is_file():
        raise OptionError(f"{file} is no file: choose another --prompt-cache-file")
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size)) if size <= LONGEST_HEADER else None
        told = header["__metadata__"] if isinstance(header, dict) else {}
    except OSError as problem:
        raise OptionError(f"cannot read {file}: {problem.strerror}") from None
    except (ValueError, KeyError, RecursionError):
        told = {}
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise OptionError(
            f"{file} is no prompt cache that mlx-specdec has written: choose another "
            "--prompt-cache-file"
        )
    return told


def write(cache: PromptCache, file: Path, metadata: Mapping[str, str]) -> None:
    """Write what is kept, but for the caches of models with windows or recurrent state.

    metadata: what is said of it. Raises OutputError.
    """
    arrays, lags = _arrays(cache), json.dumps(cache.tree.lags)
    told = {**metadata, "format": FORMAT, "layout": LAYOUT, "lags": lags}
    told["digest"] = _digest(arrays, lags)
    try:
        with replacing(file.resolve(), make_parents=False) as stream:
            mx.save_safetensors(stream, arrays, told)
    except OSError as problem:
        raise OutputError(f"cannot write {file}: {problem.strerror}") from None


def fill(cache: PromptCache, file: Path, names: Collection[str]) -> None:
    """Take what a file of this layout has, the newest first, as far as the cache's bound goes.

    names: of what is taken. Raises OptionError for a damaged file.
    """
    try:
        loaded: Any = mx.load(str(file), format="safetensors", return_metadata=True)
        arrays, told = loaded
        mx.eval(arrays)
        if _digest(arrays, told["lags"]) != told["digest"]:
            raise ValueError("its contents are not what was written")
        cache.tree.lags.update(json.loads(told["lags"]))
        _take(cache, arrays, names)
    except (ValueError, KeyError, RuntimeError, IndexError) as problem:
        raise _damaged(file, problem) from None


def models_in(told: Mapping[str, str], file: Path) -> dict[str, str]:
    """What metadata says of the models, by the name of what they computed. Raises OptionError."""
    try:
        models = json.loads(told["models"])
        if not isinstance(models, dict):
            raise ValueError("it names no models")
    except (ValueError, KeyError, RecursionError) as problem:
        raise _damaged(file, problem) from None
    return models


def _damaged(file: Path, problem: Exception) -> OptionError:
    return OptionError(
        f"{file} is damaged ({first_line(problem):.100}): delete it, or choose another "
        "--prompt-cache-file"
    )


def _arrays(cache: PromptCache) -> Arrays:
    tokens: list[int] = []
    table: list[list[int]] = []
    numbers: dict[Node | None, int] = {}
    arrays: Arrays = {}
    for number, node in enumerate(cache.tree):
        numbers[node] = number
        table.append([numbers.get(node.parent, -1), len(node.tokens)])
        tokens += node.tokens
        for name, own in node.columns.items():
            arrays |= {f"{number}.{name}.columns.{at}": each for at, each in enumerate(own)}
        for name, whole in node.wholes.items():
            if whole.value is None:
                own = whole.arrays
                arrays |= {f"{number}.{name}.whole.{at}": each for at, each in enumerate(own)}
    arrays["tokens"] = mx.array(tokens, dtype=mx.int32)
    arrays["nodes"] = mx.array(table, dtype=mx.int32).reshape(-1, 2)
    return arrays


def _take(cache: PromptCache, arrays: Arrays, names: Collection[str]) -> None:
    tokens: list[int] = arrays.pop("tokens").tolist()  # type: ignore[assignment]
    table: list[list[int]] = arrays.pop("nodes").tolist()  # type: ignore[assignment]
    held: list[dict[tuple[str, str], list[mx.array]]] = [{} for _ in table]
    for key in sorted(arrays, key=_order):
        number, name, kind, _ = key.split(".")
        if name in names:
            held[int(number)].setdefault((name, kind), []).append(arrays[key])
    nodes: list[Node] = []
    begin = 0
    for (parent, count), parts in zip(table, held, strict=True):
        nbytes = sum(each.nbytes for own in parts.values() for each in own)
        if cache.nbytes + nbytes > cache.max_bytes:
            return
        stretch, begin = tokens[begin : begin + count], begin + count
        node = cache.tree.add_oldest(nodes[parent] if parent >= 0 else None, stretch)
        nodes.append(node)
        for (name, kind), own in parts.items():
            value: Any = tuple(own)
            if kind == "whole":
                value = Snapshot(node.end, None, value, exact=True)
            cache.tree.put(node, name, value)


def _order(key: str) -> tuple[int, str, str, int]:
    number, name, kind, at = key.split(".")
    return int(number), name, kind, int(at)


def _digest(arrays: Arrays, lags: str) -> str:
    digest = hashlib.blake2b(lags.encode(), digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        if array.size:
            numbers: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)
            digest.update(memoryview(numbers))
    return digest.hexdigest()


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
            metadata_of(self.file)

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
        told, own = metadata_of(self.file), _metadata(pair)
        if told.get("layout") != LAYOUT or told.get("made_by") != own["made_by"]:
            warnings.warn(
                f"{self.file} was written by {told.get('made_by', 'another version')}, and this "
                f"is {own['made_by']}: it is written anew",
                RuntimeWarning,
                stacklevel=2,
            )
            cache.changed = True
            return cache
        there, here = models_in(told, self.file), models_in(own, self.file)
        if there.get(TARGET) != here[TARGET]:
            raise OptionError(
                f"{self.file} was made for another model than {pair.name}, or for other weights, "
                "another config.json, adapter, device or flags of it: choose another "
                "--prompt-cache-file"
            )
        fill(cache, self.file, [name for name in here if there.get(name) == here[name]])
        return cache

    def close(self, cache: PromptCache, pair: Pair) -> None:
        """Write the file, if something is new. Raises OutputError."""
        if self.file is not None and cache.changed:
            write(cache, self.file, _metadata(pair))
            cache.changed = False


def _metadata(pair: Pair) -> dict[str, str]:
    models = {TARGET: _of_model(pair.target)}
    if pair.draft is not None:
        models["draft"] = _of_model(pair.draft)
    if pair.drafter_network is not None:
        # What stands in its config.json alone, no weight tells.
        told = f"{' '.join(pair.drafter_network.taps)}, {pair.drafter_network.sizes}"
        models[pair.drafter_network.kind] = f"{fingerprint(pair.drafter_network)} of {told}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    return {"models": json.dumps(models), "made_by": f"mlx-specdec {__version__}, {versions}"}


def _of_model(model: Base) -> str:
    """Of its weights, of what else its passes depend on, and of the arrays of its caches."""
    own = _memory(model)
    arrays = own.columns(0, 1) if own.columns is not None else ()
    layout = [f"{array.shape} {array.dtype}" for array in arrays]
    rest = hashlib.blake2b(repr((model.identity, layout)).encode(), digest_size=16).hexdigest()
    return fingerprint(model.network) + rest


def _memory(model: Base) -> Reusable:
    """Of one token. Nothing is computed: shapes are known as soon as the graph is built."""
    context = model.open([0])
    context.advance(mx.zeros((1, 1), dtype=mx.int32))
    return context.reusable(0)


def _fits_files(memory: Reusable) -> bool:
    return memory.columns is not None or (
        memory.snapshot is not None and memory.snapshot.value is None
    )


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
