"""A prompt cache on disk: one safetensors file, which is replaced as a whole or not at all,
with the nodes from the most to the least recently used: parents before their children."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints import disk
from ..errors import OptionError, OutputError, first_line
from ..interfaces.results import TARGET, Reusable, Snapshot
from ..models.base import Base
from ..process import replacing
from ..version import __version__
from .pair import Pair
from .prompt_cache import Node, PromptCache

FORMAT = "mlx-specdec prompt cache"
LAYOUT = "3"
"""Version of the file and of what models compute; a file of another one is written anew."""
LONGEST_HEADER = 100_000_000
SHARE = 1 / 8
MOST = 8 << 30
"""The default limit of a cache: a share of the machine's memory, and at most so many bytes."""
SAMPLED = 64
"""Numbers of each array of weights that tell one model from another."""
Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Store:
    """Opens and saves the prompt cache of a pair. max_bytes: None is the default, 0 caches nothing.
    file: None for memory alone. Raises OptionError for a file that is no prompt cache."""

    max_bytes: int | None = None
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            _metadata_of(self.file)

    def open(self, pair: Pair) -> PromptCache | None:
        """Return the cache of a pair, with what the file has of it; None where nothing is cached.
        Raises OptionError for a file of another target, a damaged one, and for targets of which
        nothing can be kept. Warns of a file of another version, which is written anew."""
        if self.max_bytes == 0:
            return None
        default = min(MOST, int(SHARE * disk.memory()))
        cache = PromptCache(default if self.max_bytes is None else self.max_bytes)
        if self.file is None:
            return cache
        if not pair.target.rows_agree:
            raise OptionError(
                f"nothing of a prompt can be kept for {pair.name}, which gives several "
                "tokens at once other scores than one after the other: leave "
                "--prompt-cache-file out"
            )
        computed = _computed(pair.target)
        if computed.columns is None and computed.snapshot is None:
            raise OptionError(
                f"nothing of a prompt can be kept for {pair.name}, which several machines share: "
                "leave --prompt-cache-file out"
            )
        if self.file.exists():
            self._fill(cache, self.file, pair)
        return cache

    def close(self, cache: PromptCache, pair: Pair) -> None:
        """Write the file, if the cache has changed. Raises OutputError."""
        if self.file is None or not cache.changed:
            return
        lags = json.dumps(cache.lags)
        arrays, states = _parts(cache)
        metadata = _metadata(pair) | {"format": FORMAT, "layout": LAYOUT, "lags": lags}
        metadata["states"] = json.dumps(states)
        try:
            with replacing(self.file.resolve(), make_parents=False) as stream:
                mx.save_safetensors(stream, arrays, metadata)
        except OSError as problem:
            raise OutputError(f"cannot write {self.file}: {problem.strerror}") from None
        cache.changed = False

    def _fill(self, cache: PromptCache, file: Path, pair: Pair) -> None:
        """Load what a file has of this pair's models, as far as the cache's limit goes."""
        metadata, expected = _metadata_of(file), _metadata(pair)
        if metadata.get("layout") != LAYOUT or metadata.get("made_by") != expected["made_by"]:
            warnings.warn(
                f"{file} was written by {metadata.get('made_by', 'another version')}, and this "
                f"is {expected['made_by']}: it is written anew",
                RuntimeWarning,
                stacklevel=3,
            )
            cache.changed = True
            return
        try:
            stored, models = dict(json.loads(metadata["models"])), json.loads(expected["models"])
            if stored.get(TARGET) != models[TARGET]:
                raise OptionError(
                    f"{file} was made for another model than {pair.name}, or for other weights, "
                    "another config.json, adapter, device or flags of it: choose another "
                    "--prompt-cache-file"
                )
            arrays: Any = mx.load(str(file), format="safetensors")
            mx.eval(arrays)
            cache.lags.update(json.loads(metadata["lags"]))
            names = [name for name in models if stored.get(name) == models[name]]
            _take(cache, arrays, json.loads(metadata["states"]), names)
        except OptionError:
            raise
        except (ValueError, TypeError, KeyError, RuntimeError, IndexError) as problem:
            raise OptionError(
                f"{file} is damaged ({first_line(problem):.100}): delete it, or choose another "
                "--prompt-cache-file"
            ) from None
        cache.changed = False


def _metadata_of(file: Path) -> dict[str, str]:
    """Return the metadata in a file's header. Raises OptionError for what is no prompt cache."""
    if not file.is_file():
        raise OptionError(f"{file} is no file: choose another --prompt-cache-file")
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size)) if size <= LONGEST_HEADER else None
        metadata = header["__metadata__"] if isinstance(header, dict) else {}
    except OSError as problem:
        raise OptionError(f"cannot read {file}: {problem.strerror}") from None
    except (ValueError, KeyError, RecursionError):
        metadata = {}
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise OptionError(
            f"{file} is no prompt cache that mlx-specdec has written: choose another "
            "--prompt-cache-file"
        )
    return metadata


def _parts(cache: PromptCache) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays of a file, and how models read those of their snapshots."""
    states: dict[str, str] = {}
    tokens: list[int] = []
    table: list[list[int]] = []
    numbers: dict[Node | None, int] = {}
    arrays: Arrays = {}
    for number, node in enumerate(cache.nodes):
        numbers[node] = number
        table.append([numbers.get(node.parent, -1), len(node.tokens)])
        tokens += node.tokens
        parts = {f"{name}.columns": each for name, each in node.columns.items()}
        for name, each in node.snapshots.items():
            parts[f"{name}.whole"] = each.arrays
            if each.value is not None:
                states[f"{number}.{name}"] = each.value
        for name, part in parts.items():
            arrays |= {f"{number}.{name}.{at}": each for at, each in enumerate(part)}
    arrays["tokens"] = mx.array(tokens, dtype=mx.int32)
    arrays["nodes"] = mx.array(table, dtype=mx.int32).reshape(-1, 2)
    return arrays, states


def _take(
    cache: PromptCache, arrays: Arrays, states: Mapping[str, str], names: Collection[str]
) -> None:
    """Add the nodes of a file, with the parts of these names, the most recently used first."""
    tokens: Any = arrays.pop("tokens").tolist()
    table: Any = arrays.pop("nodes").tolist()
    parts: list[dict[tuple[str, str], list[mx.array]]] = [{} for _ in table]
    for key in sorted(arrays, key=lambda key: int(key.rpartition(".")[2])):
        number, name, kind, _ = key.split(".")
        if name in names:
            parts[int(number)].setdefault((name, kind), []).append(arrays[key])
    nodes: list[Node] = []
    begin = 0
    for at, ((parent, count), of_node) in enumerate(zip(table, parts, strict=True)):
        nbytes = sum(each.nbytes for part in of_node.values() for each in part)
        if cache.nbytes + nbytes > cache.max_bytes:
            return
        stretch, begin = tokens[begin : begin + count], begin + count
        node = cache.add_oldest(nodes[parent] if parent >= 0 else None, stretch)
        nodes.append(node)
        for (name, kind), part in of_node.items():
            value: tuple[mx.array, ...] | Snapshot = tuple(part)
            if kind == "whole":
                state = states.get(f"{at}.{name}")
                value = Snapshot(node.end, state, tuple(part), exact=state is None)
            cache.put(node, name, value)


def _metadata(pair: Pair) -> dict[str, str]:
    models = {TARGET: _of_model(pair.target)}
    if pair.draft is not None:
        models["draft"] = _of_model(pair.draft)
    if (drafter := pair.drafter_network) is not None:
        # Its config.json has settings that no weight shows.
        settings = f"{' '.join(drafter.taps)}, {drafter.sizes}"
        models[drafter.kind] = f"{fingerprint(drafter)} of {settings}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    return {"models": json.dumps(models), "made_by": f"mlx-specdec {__version__}, {versions}"}


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
    samples = [_sample(array) for _, array in weights]
    mx.eval(samples)
    for (name, array), sample in zip(weights, samples, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype} {sample.tolist()}".encode())
    return digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    last = array.size - 1
    places = [last * place // (SAMPLED - 1) for place in range(SAMPLED)]
    return mx.take(array, mx.array(places, dtype=mx.int64))
