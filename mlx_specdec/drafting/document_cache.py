"""Indexes of documents on disk, in the platform's cache directory.

A file is a header, the order of places, the tokens: 8 bytes a token and HEADER. It is flushed to
the disk before it takes its place, so header and size are proof enough that it is whole, and a
start reads no more than it searches. A cache is a help and never a duty: what is broken is built
again, and where nothing can be written the index stays in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .document_index import DEPTH, WIDTH, DocumentIndex, backwards, order, stored
from .suffix_array import Integers

PLACE = "MLX_SPECDEC_CACHE"
"""Environment variable: a directory to use in place of the platform's."""
FORMAT = 2
HEADER = 512
BLOCK = 1 << 22
KEPT = 2 << 30
"""Bytes of all indexes together; beyond, those that were used longest ago are deleted."""
ABANDONED = 24 * 3600
"""Seconds after which a file that was never finished is deleted."""
SUFFIX = ".documents"
SETTLED = 5
"""Seconds after its last change from which on a file's time tells its contents."""
_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class IndexKey:
    """What an index depends on: digests of the documents and of the tokenizer, and how many token
    ids the model has."""

    documents: str
    tokenizer: str
    vocabulary: int


def directory() -> Path:
    """Where the indexes lie; it need not exist."""
    if place := os.environ.get(PLACE):
        return Path(place) / "documents"
    from platformdirs import user_cache_path

    return user_cache_path("mlx-specdec") / "documents"


def digest(files: Sequence[Path], compute: Callable[[Sequence[Path]], str]) -> str:
    """`compute(files)`, remembered by the files' paths, sizes and times of change: hashing a large
    corpus takes longer than opening its index."""
    try:
        states = [(os.path.abspath(file), os.stat(file)) for file in files]
    except OSError:
        return compute(files)  # it says what is wrong
    told = json.dumps([(path, state.st_size, state.st_mtime_ns) for path, state in states])
    note = directory() / f"{hashlib.blake2b(told.encode(), digest_size=16).hexdigest()}.digest"
    with contextlib.suppress(OSError, ValueError):
        if _DIGEST.fullmatch(kept := note.read_text(encoding="ascii")):
            return kept
    computed = compute(files)
    # What changed just now may change again without a change of its time.
    if all(state.st_mtime < time.time() - SETTLED for _, state in states):
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(computed, encoding="ascii")
    return computed


def read(key: IndexKey) -> DocumentIndex | None:
    """The index as a file mapped into memory; None where there is none that is whole."""
    file = _file(key)
    try:
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        header = json.loads(mapped[:HEADER])
    except (OSError, ValueError):
        return None
    count, rest = divmod(len(mapped) - HEADER, 2 * WIDTH)
    if rest or header != _header(key, count):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    end = HEADER + WIDTH * count
    return DocumentIndex(memoryview(mapped)[HEADER:end].cast("i"), mapped, end)


def build(
    key: IndexKey, documents: list[Integers], report: Callable[[int, int], None] | None = None
) -> DocumentIndex:
    """Build an index and keep it on disk if that works.

    documents: token ids, int32 each; the list is emptied, to have the memory. report: called with
    (done, total).
    """
    tokens = backwards(documents, key.vocabulary)
    documents.clear()
    places = order(tokens, report)
    kept = read(key) if write(key, places, tokens) else None
    return DocumentIndex(places.data, stored(tokens)) if kept is None else kept


def write(key: IndexKey, places: Integers, tokens: Integers) -> bool:
    """Replace what is there, whole or not at all; says whether that went well.

    places, tokens: see `document_index.order` and `backwards`.
    """
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _delete_old(file.parent, places.nbytes + tokens.nbytes)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".partial")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(json.dumps(_header(key, len(places))).encode().ljust(HEADER))
            for begin in range(0, len(places), BLOCK):
                stream.write(places[begin : begin + BLOCK].tobytes())
            for begin in range(0, len(tokens), BLOCK):
                stream.write(stored(tokens[begin : begin + BLOCK]))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, file)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(problem, OSError):
            return False
        raise
    return True


def _file(key: IndexKey) -> Path:
    name = f"{key.documents}-{key.tokenizer}-{key.vocabulary}-{FORMAT}{SUFFIX}"
    return directory() / name


def _header(key: IndexKey, count: int) -> dict[str, object]:
    layout = {"format": FORMAT, "depth": DEPTH, "byteorder": sys.byteorder}
    return {**layout, **asdict(key), "count": count}


def _delete_old(place: Path, needed: int) -> None:
    """Make room for `needed` bytes among KEPT, and sweep up what killed processes left."""
    room = KEPT - needed
    indexes = []
    for file in place.iterdir():
        with contextlib.suppress(OSError):
            status = file.stat()
            if file.suffix == ".partial" and status.st_mtime < time.time() - ABANDONED:
                file.unlink()
            elif file.suffix == SUFFIX:
                indexes.append((status.st_mtime, status.st_size, file))
    for _, size, file in sorted(indexes, reverse=True):
        room -= size
        if room < 0:
            with contextlib.suppress(OSError):
                file.unlink()
