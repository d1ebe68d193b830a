"""The directory of a prompt cache. Blocks are safetensors files whose names are digests of their
contents, so that truncated or damaged files are recognized."""

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import process
from ..interfaces.results import Cached

FORMAT = "mlx-specdec prompt cache block 1"
HEADER = 1 << 24
"""Limit of the bytes of a block's header. Files with a longer header are no blocks."""
OVERHEAD, OF_ARRAY, OF_TOKEN = 2048, 160, 12
"""Upper bounds on the bytes of a file besides the data of its arrays: in total, for each array, and
for each token."""
NAME = re.compile("[0-9a-f]{64}")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """The description of a block.

    Attributes:
        name: TARGET, or the name of a proposer.
        model: A digest of everything but the tokens that the arrays depend on.
        before: A digest of the tenant and of the tokens that precede position `begin`.
        begin: Position of the first token in the sequence.
        tokens: Token ids of the segment.
        lag: Number of later tokens that each column depends on.
        snapshot: Whether the block is a snapshot, and not columns.
        state: `Cached.description` of a snapshot.
        tenant: The tenant to which the sequence belongs, a digest of the API key."""

    name: str
    model: str
    before: str
    begin: int
    tokens: Sequence[int]
    lag: int = 0
    snapshot: bool = False
    state: str | None = None
    tenant: str = ""

    @property
    def exact(self) -> bool:
        return self.snapshot and self.state is None


@dataclass(eq=False)
class DiskBlock:
    """Columns or a snapshot on disk.

    Attributes:
        nbytes: Size of the file, or an upper bound if it is not written yet.
        value: The arrays until they are written, then None.
        file: The file, or None if it is not written yet, or writing failed.
        written: Set as soon as writing has succeeded or failed."""

    record: Record
    nbytes: int
    value: Cached | None = None
    file: Path | None = None
    written: threading.Event = field(default_factory=threading.Event)

    def with_file(self, act: Callable[[Path], object]) -> None:
        """Call a function with the file, if there is one."""
        if self.file is not None:
            act(self.file)


class Directory:
    """A directory of blocks, which only one process uses at a time. A thread writes the blocks.

    Args:
        path: The directory, which exists.
        max_bytes: Limit of the bytes in all files.
        models: The digest that `Record.model` must have, by name. Other blocks are not read."""

    def __init__(self, path: Path, max_bytes: int, models: Mapping[str, str]) -> None:
        self.path, self.max_bytes, self.models = path, max_bytes, models
        self.nbytes = 0
        self._others: list[Path] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="prompt cache", daemon=True)
        self._thread.start()

    def blocks(self) -> list[DiskBlock]:
        """Return the blocks of earlier processes that fit these models, the oldest one first."""
        for half_written in self.path.glob(".*.partial"):
            half_written.unlink(missing_ok=True)
        found = []
        named = (file for file in self.path.glob("*.safetensors") if NAME.fullmatch(file.stem))
        stats = [(file.stat(), file) for file in named]
        for stat, file in sorted(stats, key=lambda pair: pair[0].st_mtime_ns):
            self.nbytes += stat.st_size
            record = _record(file)
            if record is None:
                file.unlink()
                self.nbytes -= stat.st_size
            elif self.models.get(record.name) != record.model:
                self._others.insert(0, file)
            else:
                found.append(DiskBlock(record, stat.st_size, file=file))
                found[-1].written.set()
        return found

    def remove_other(self) -> bool:
        """Remove the oldest block that does not fit these models. Return False if there is none."""
        if not self._others:
            return False
        file = self._others.pop()
        with contextlib.suppress(OSError):
            self.nbytes -= file.stat().st_size
            file.unlink()
        return True

    def write(self, record: Record, value: Cached) -> DiskBlock:
        """Queue a block for writing. The arrays must be evaluated and must not change."""
        block = DiskBlock(record, nbytes_of(record, value), value)
        self.nbytes += block.nbytes
        self._jobs.put(lambda: self._write(block))
        return block

    def read(self, block: DiskBlock) -> Cached | None:
        """Return the arrays of a block, or None if the file is missing or damaged."""
        value = block.value
        if value is not None or block.file is None:
            return value
        try:
            content = block.file.read_bytes()
            if _digest(content) != block.file.stem:
                return None
            loaded: Any = mx.load(io.BytesIO(content), format="safetensors")
            arrays = tuple(loaded[str(number)] for number in range(len(loaded)))
            mx.eval(arrays)
        except (OSError, RuntimeError, ValueError, KeyError):
            return None
        record = block.record
        if not record.snapshot:
            return Cached(arrays[0].shape[2], arrays) if arrays else None
        return Cached(len(record.tokens), arrays, True, record.state, record.exact)

    def remove(self, block: DiskBlock) -> None:
        self.nbytes -= block.nbytes
        self._jobs.put(lambda: block.with_file(lambda file: file.unlink(missing_ok=True)))

    def touch(self, blocks: Iterable[DiskBlock]) -> None:
        """Mark these blocks as the most recently used ones."""
        for block in blocks:
            self._jobs.put(functools.partial(block.with_file, os.utime))

    def close(self) -> None:
        """Wait until all blocks are written, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        process.clear_at_end()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as problem:
                log.warning("a block of the prompt cache was not written: %s", problem)

    def _write(self, block: DiskBlock) -> None:
        try:
            value, stream = block.value, io.BytesIO()
            arrays = () if value is None else value.arrays
            metadata = {"format": FORMAT, "record": json.dumps(asdict(block.record))}
            parts = {str(number): array for number, array in enumerate(arrays)}
            mx.save_safetensors(stream, parts, metadata)
            content = stream.getvalue()
            file = self.path / f"{_digest(content)}.safetensors"
            with process.replacing(file, make_parents=False) as out:
                out.write(content)
            block.file = file
        finally:
            block.value = None
            block.written.set()


def nbytes_of(record: Record, value: Cached) -> int:
    """Return an upper bound on the size of a block's file."""
    rest = OVERHEAD + OF_ARRAY * len(value.arrays) + OF_TOKEN * len(record.tokens)
    return value.nbytes + rest + 2 * len(record.state or "")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _record(file: Path) -> Record | None:
    """Return the record in a file's header, or None if there is none."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            metadata = json.loads(stream.read(min(size, HEADER)))["__metadata__"]
        if metadata["format"] != FORMAT:
            return None
        return Record(**json.loads(metadata["record"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
