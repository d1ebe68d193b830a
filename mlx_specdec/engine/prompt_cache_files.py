"""The parts of a prompt cache, and the directory that holds them."""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        file: The file in the directory, as soon as it is written; None if there is none.
        file_bytes: An upper bound on the size of the file."""

    model: str
    before: str
    tokens: list[int]
    lag: int
    state: Cached
    value: Cached | None = None
    file: Future[Path] | None = None
    file_bytes: int = 0

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


class Directory:
    """The parts in a directory, which only one process uses at a time. Each part is a safetensors
    file, whose name is a digest of its content. A thread writes the files. Damaged files are found
    by the digest in their header at the start, or by their name when they are read.

    MLX gets paths and no Python stream. Its threads would need Python's lock to use a stream, and
    `mx.clear_cache` in another thread can hold this lock until all of MLX's threads are idle.

    Args:
        path: The directory, which exists. Files of other models are never found, because their
            digests differ.
        max_bytes: Limit of the bytes in all files.
        models: The digest of each model, by the name of its state."""

    def __init__(self, path: Path, max_bytes: int, models: Mapping[str, str]) -> None:
        self.path, self.max_bytes, self.models, self.nbytes = path, max_bytes, models, 0
        self._writer = ThreadPoolExecutor(1, "prompt cache", system.clear_at_end)

    def stored(self) -> Iterator[Part]:
        """Yield the parts of earlier processes, the least recently used one first."""
        for half_written in filter(Path.is_file, self.path.glob(".*.partial*")):
            half_written.unlink(missing_ok=True)
        named = (file for file in self.path.glob("*.safetensors") if FILE_NAME.fullmatch(file.stem))
        stats = [(file.stat(), file) for file in named if file.is_file()]
        unusable = []
        for stat, file in sorted(stats, key=lambda pair: pair[0].st_mtime_ns):
            try:
                part = Part.of(safetensors.metadata(file))
            except (CheckpointError, KeyError, ValueError):
                unusable.append(file)
                continue
            part.file, part.file_bytes = Future(), stat.st_size
            part.file.set_result(file)
            self.nbytes += stat.st_size
            yield part
        _remove_unusable(unusable)

    def add(self, part: Part, value: Cached) -> None:
        """Write a part. The arrays of its value are computed and never change."""
        part.file_bytes = self.size(part, value)
        self.nbytes += part.file_bytes
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
        self._with_file(part, Path.unlink)
        self.nbytes -= part.file_bytes
        part.file = None

    def touch(self, part: Part) -> None:
        """Mark a part as the most recently used one."""
        now = time.time_ns()
        self._with_file(part, partial(os.utime, ns=(now, now)))

    def close(self) -> None:
        """Wait until all files are written."""
        self._writer.shutdown()

    def size(self, part: Part, value: Cached) -> int:
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
        said = "removing damaged files, or files of another version, of the prompt cache: %d, as %s"
        log.warning(said, len(files), ", ".join(file.name for file in files[:3]))
    for file in files:
        file.unlink(missing_ok=True)
