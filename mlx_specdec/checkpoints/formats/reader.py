"""What every format's reader gives: the list of its tensors at once, rows when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import mlx.core as mx


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor. dtype: as safetensors writes it, for example "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def extent(self) -> int:
        """Entries along the first axis, 1 for a scalar."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class Contents:
    """What one file, or several, hold under their own names.

    stored: type as the format calls it, shape and bytes in the file. origins: the name under which
    a reader hands a tensor out -> its name in the file. tied: a name that the reader leaves out ->
    the name in the file that has the same values. dropped: another that it leaves out -> why.
    shared: name -> an earlier one that has the very same bytes of the file.
    """

    stored: Mapping[str, TensorInfo]
    origins: Mapping[str, str]
    tied: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def plain(cls, infos: Mapping[str, TensorInfo]) -> Contents:
        """Of a format whose names and types are taken as they are."""
        return cls(infos, {name: name for name in infos})


class Reader(Protocol):
    """The tensors of one file, or of one model in several parts. Made from a path; that raises
    CheckpointError for what is damaged, truncated, or lies about its size."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Type, shape and size of every tensor that is handed out, by name; from headers alone."""

    @property
    def contents(self) -> Contents:
        """The same under the file's own names and types, with what is not handed out."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files, in their order."""

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Entries begin .. end - 1 along the first axis; a scalar whole. Read now, copied once:
        no more than these is ever in memory."""
