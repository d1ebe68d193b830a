"""The directory of a prompt cache. Blocks are safetensors files. The name of a file is a digest of
its header, which contains a digest of the data, so that damaged files are recognized.

MLX gets no Python stream here. Its threads would need Python's lock to use the stream, and
`mx.clear_cache` in another thread can hold this lock until all of MLX's threads are idle."""

import contextlib
import functools
import hashlib
import json
import logging
import os
import queue
import re
import threading
from array import array as numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, deserialize

from .. import system
from ..checkpoints.tensors import ELEMENTS, NAMES, to_mlx
from ..types import Cached

BLOCK_FORMAT = "mlx-specdec prompt cache block 2"
HEADER = 1 << 24
"""Limit of the bytes of a block's header. Files with a longer header are no blocks."""
OVERHEAD, OF_ARRAY, OF_TOKEN = 2048, 160, 12
"""Upper bounds on the bytes of a file besides the data of its arrays: in total, for each array, and
for each token."""
BLOCK_NAME = re.compile("[0-9a-f]{64}")
UNREADABLE = (
    *(OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError),
    SafetensorError,
)
"""What is raised if a file is no block."""
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
        lag: Number of later tokens that each position depends on.
        snapshot: Whether the block is a snapshot, and not positions.
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
        for half_written in filter(Path.is_file, self.path.glob(".*.partial")):
            half_written.unlink(missing_ok=True)
        found = []
        named = (
            file for file in self.path.glob("*.safetensors") if BLOCK_NAME.fullmatch(file.stem)
        )
        stats = [(file.stat(), file) for file in named if file.is_file()]
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
            arrays = _arrays(block.file.read_bytes(), block.file.stem)
            mx.eval(arrays)
        except UNREADABLE:
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
            self._jobs.put(functools.partial(block.with_file, _touch))

    def close(self) -> None:
        """Wait until all blocks are written, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        system.clear_at_end()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as problem:
                log.warning("a block of the prompt cache was not written: %s", problem)

    def _write(self, block: DiskBlock) -> None:
        try:
            value = block.value
            header, data = _packed(block.record, () if value is None else value.arrays)
            file = self.path / f"{_digest(header)}.safetensors"
            with system.replacing(file, make_parents=False) as out:
                out.write(header)
                out.write(data)
            block.file = file
        finally:
            block.value = None
            block.written.set()


def nbytes_of(record: Record, value: Cached) -> int:
    """Return an upper bound on the size of a block's file."""
    rest = OVERHEAD + OF_ARRAY * len(value.arrays) + OF_TOKEN * len(record.tokens)
    return value.nbytes + rest + 2 * len(record.state or "")


def _touch(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.utime(file)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _packed(record: Record, arrays: Sequence[mx.array]) -> tuple[bytes, bytes]:
    """Return the header of a block's file and the data after it."""
    entries: dict[str, object] = {}
    parts, end = [], 0
    for number, array in enumerate(arrays):
        # numpy has no bfloat16.
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        parts.append(np.asarray(bits).tobytes())
        begin, end = end, end + len(parts[-1])
        entries[str(number)] = {
            "dtype": NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": [begin, end],
        }
    data = b"".join(parts)
    text = json.dumps(asdict(record))
    entries["__metadata__"] = {"format": BLOCK_FORMAT, "record": text, "digest": _digest(data)}
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header, data


def _record(file: Path) -> Record | None:
    """Return the record in a file's header, or None if the file is no block or is damaged."""
    try:
        with file.open("rb") as stream:
            size = stream.read(8)
            header = size + stream.read(min(int.from_bytes(size, "little"), HEADER))
        record = Record(**json.loads(_metadata(header, file.stem)["record"]))
        _check(record)
    except UNREADABLE:
        return None
    return record


def _metadata(header: bytes, name: str) -> dict[str, str]:
    """Return the metadata in the header of a file with this name, or raise one of UNREADABLE."""
    metadata: dict[str, str] = json.loads(header[8:])["__metadata__"]
    if _digest(header) != name or metadata["format"] != BLOCK_FORMAT:
        raise ValueError
    return metadata


def _check(record: Record) -> None:
    """Raise one of UNREADABLE if a record that was read has a value of a wrong type."""
    state = "" if record.state is None else record.state
    texts = record.name, record.model, record.before, record.tenant, state
    "".join(texts).encode()  # half a surrogate pair raises ValueError
    numbers("I", [record.begin, record.lag, *record.tokens])
    if record.snapshot not in (True, False):
        raise TypeError


def _arrays(content: bytes, name: str) -> tuple[mx.array, ...]:
    """Return the arrays of a file with this name, or raise one of UNREADABLE."""
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    if _digest(content[len(header) :]) != _metadata(header, name)["digest"]:
        raise ValueError
    parts = dict(deserialize(content))
    arrays = []
    for number in range(len(parts)):
        part = parts[str(number)]
        values = np.frombuffer(part["data"], f"<{ELEMENTS[part['dtype']][1]}")
        arrays.append(to_mlx(values.reshape(part["shape"]), part["dtype"]))
    return tuple(arrays)
