"""The parts of a prompt cache, and the tiers that hold them: the memory and a directory."""

import hashlib
import json
import logging
import os
import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from .. import system
from ..checkpoints.formats import safetensors
from ..errors import CheckpointError
from ..types import Cached

FORMAT = "mlx-specdec prompt cache 3"
"""Name of the format of the files, which is a part of the digest of a header. It changes with the
layout of the cached arrays, too."""
OVERHEAD, OF_ARRAY = 2048, 160
"""Upper bounds on the bytes of a file besides its data and metadata: in total, and for each array.
"""
FILE_NAME = re.compile("[0-9a-f]{64}")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Part:
    """The keys and values of a block of tokens, or a snapshot at the block's end.

    Attributes:
        model: A digest of everything but the tokens that the arrays depend on.
        before: A digest of the tenant and of the tokens before the block.
        tokens: Token ids of the block.
        lag: Number of later tokens that each position depends on.
        state: The state without its arrays.
        value: The state with its arrays if it is in memory, else None.
        file: The file in the directory, as soon as it is written; None if there is none."""

    model: str
    before: str
    tokens: list[int]
    lag: int
    state: Cached
    value: Cached | None = None
    file: Future[Path] | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """The entries about the part in the header of its file."""
        state = {**vars(self.state), "arrays": ()}
        entries = {"model": self.model, "before": self.before, "tokens": self.tokens}
        text = json.dumps({**entries, "lag": self.lag, "state": state})
        return {"part": text, "digest": _digest_of(text)}

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> "Part":
        """Return the part that a header describes. Raises KeyError or ValueError if the header is
        damaged or has another format."""
        if metadata["digest"] != _digest_of(metadata["part"]):
            raise ValueError
        entries = json.loads(metadata["part"])
        return cls(**{**entries, "state": Cached(**{**entries["state"], "arrays": ()})})


class Tier:
    """Parts in one place, which is the memory here, from the least to the most recently used one.

    Attributes:
        max_bytes: Limit of the parts' bytes.
        nbytes: Bytes of all parts."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self.parts: OrderedDict[Part, int] = OrderedDict()
        self._after: defaultdict[tuple[str, str], list[Part]] = defaultdict(list)

    def after(self, model: str, before: str) -> list[Part]:
        """Return the parts of a model whose blocks follow the same tokens."""
        return self._after.get((model, before), [])

    def make_room(self, part: Part, value: Cached, in_use: Collection[Part]) -> bool:
        """Remove the least recently used parts that are not in use until a part with this value
        fits. Return False if it cannot fit."""
        nbytes = self._size(part, value)
        while nbytes <= self.max_bytes < self.nbytes + nbytes:
            oldest = next((other for other in self.parts if other not in in_use), None)
            if oldest is None:
                return False
            self.remove(oldest)
        return nbytes <= self.max_bytes

    def add(self, part: Part, value: Cached) -> None:
        """Add a part. The arrays of its value are computed and never change."""
        self._put(part, self._size(part, value))
        part.value = value

    def remove(self, part: Part) -> None:
        self._take(part)
        if part.file is not None:
            wait([part.file])  # until then the writer needs the arrays
        part.value = None

    def touch(self, part: Part) -> None:
        """Mark a part as the most recently used one."""
        self.parts.move_to_end(part)

    def _put(self, part: Part, nbytes: int) -> None:
        self.nbytes += nbytes
        self.parts[part] = nbytes
        self._after[part.model, part.before].append(part)

    def _take(self, part: Part) -> None:
        self.nbytes -= self.parts.pop(part)
        key = part.model, part.before
        self._after[key].remove(part)
        if not self._after[key]:
            del self._after[key]

    def _size(self, part: Part, value: Cached) -> int:
        return value.nbytes


class Directory(Tier):
    """The parts in a directory, which only one process uses at a time. Each part is a safetensors
    file, whose name is a digest of its content. A thread writes the files. Damaged files are found
    by the digest in their header at the start, or by their name when they are read.

    MLX gets paths and no Python stream. Its threads would need Python's lock to use a stream, and
    `mx.clear_cache` in another thread can hold this lock until all of MLX's threads are idle.

    Args:
        path: The directory, which exists. All files of earlier processes are added. Files of other
            models are never found, because their digests differ.
        max_bytes: Limit of the bytes in all files.
        models: The digest of each model, by the name of its state."""

    def __init__(self, path: Path, max_bytes: int, models: Mapping[str, str]) -> None:
        super().__init__(max_bytes)
        self.path, self.models = path, models
        self._writer = ThreadPoolExecutor(1, "prompt cache", system.clear_at_end)
        for half_written in filter(Path.is_file, path.glob(".*.partial*")):
            half_written.unlink(missing_ok=True)
        named = (file for file in path.glob("*.safetensors") if FILE_NAME.fullmatch(file.stem))
        stats = [(file.stat(), file) for file in named if file.is_file()]
        unusable = []
        for stat, file in sorted(stats, key=lambda pair: pair[0].st_mtime_ns):
            try:
                part = Part.of(safetensors.metadata(file))
            except (CheckpointError, KeyError, ValueError):
                unusable.append(file)
                continue
            part.file = Future()
            part.file.set_result(file)
            self._put(part, stat.st_size)
        _remove_unusable(unusable)

    def add(self, part: Part, value: Cached) -> None:
        self._put(part, self._size(part, value))
        part.file = self._writer.submit(self._write, part, value)

    def read(self, part: Part) -> Cached | None:
        """Return a part's state, or None if its file is missing or damaged."""
        assert part.file is not None
        try:
            file = part.file.result()
            if _digest(file) != file.stem:
                raise ValueError
            arrays = safetensors.load(file)
            mx.eval(arrays)
            return replace(part.state, arrays=tuple(arrays[str(n)] for n in range(len(arrays))))
        except (CheckpointError, OSError, RuntimeError, ValueError):
            if part.file.exception() is None:
                _remove_unusable([part.file.result()])
            return None

    def remove(self, part: Part) -> None:
        self._take(part)
        self._with_file(part, Path.unlink)

    def touch(self, part: Part) -> None:
        super().touch(part)
        now = time.time_ns()
        self._with_file(part, partial(os.utime, ns=(now, now)))

    def close(self) -> None:
        """Wait until all files are written."""
        self._writer.shutdown()

    def _size(self, part: Part, value: Cached) -> int:
        """Return an upper bound on the size of a part's file."""
        described = 2 * sum(map(len, part.metadata.values()))
        return value.nbytes + OVERHEAD + OF_ARRAY * len(value.arrays) + described

    def _with_file(self, part: Part, act: Callable[[Path], object]) -> None:
        """Call a function with a part's file as soon as it is written."""

        def call(file: Future[Path]) -> None:
            with suppress(OSError, RuntimeError):
                act(file.result())

        assert part.file is not None
        part.file.add_done_callback(call)

    def _write(self, part: Part, value: Cached) -> Path:
        partial_file = self.path / f".{os.getpid()}.partial.safetensors"
        try:
            partial_file.touch(mode=0o600)
            arrays = {str(number): array for number, array in enumerate(value.arrays)}
            mx.save_safetensors(str(partial_file), arrays, part.metadata)
            file = self.path / f"{_digest(partial_file)}.safetensors"
            return partial_file.replace(file)
        except Exception as problem:
            log.warning("a part of the prompt cache was not written: %s", problem)
            raise
        finally:
            partial_file.unlink(missing_ok=True)


def _digest_of(text: str) -> str:
    return hashlib.blake2b(f"{FORMAT} {text}".encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=32)).hexdigest()


def _remove_unusable(files: Sequence[Path]) -> None:
    """Remove files that are damaged or in another format, and say so."""
    if files:
        said = "%d files of the prompt cache are damaged or of another version and are removed: %s"
        log.warning(said, len(files), ", ".join(file.name for file in files[:3]))
    for file in files:
        file.unlink(missing_ok=True)
