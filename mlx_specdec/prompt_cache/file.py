"""A prompt cache on disk: one safetensors file, which takes its place whole or not at all.

Nodes stand in it from the newest to the oldest, so that parents come before their children.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import OptionError, OutputError, first_line
from ..kept import Whole
from ..user_cache import replacing
from .cache import PromptCache
from .tree import Node

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
                value = Whole(node.end, None, value, exact=True)
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
