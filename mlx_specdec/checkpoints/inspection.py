"""What was found in a checkpoint: facts, and how they are written as JSON.

Knows figures and words. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .account import Account


@dataclass(frozen=True)
class Row:
    """One tensor. name, dtype, shape, nbytes: as the files have them. becomes: its name in a
    converted model, "" where it does not go there under one name. note: why not, or what else."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    becomes: str
    note: str


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds.

    files: name -> bytes, of the weights. sizes: from the configuration. nbytes: of all tensors,
    those that share bytes counted once; kept_nbytes: without copies and what is dropped.
    parameters: of those, packed ones unpacked, scales not counted. quantisation: in words, "" for
    none. tokenizer: in words. account: what a conversion would make of the tensors, None
    where `problem` says why it cannot be converted.
    """

    path: Path
    format: str
    model_type: str
    files: Mapping[str, int]
    sizes: Mapping[str, int]
    tensors: tuple[Row, ...]
    parameters: int
    nbytes: int
    kept_nbytes: int
    quantisation: str
    tokenizer: str
    account: Account | None
    problem: str

    @property
    def bits_per_weight(self) -> float:
        """Of what is kept, scales included."""
        return 8 * self.kept_nbytes / max(1, self.parameters)

    @property
    def dtypes(self) -> dict[str, tuple[int, int]]:
        """Type -> how many tensors, and their bytes, the most bytes first."""
        found: dict[str, tuple[int, int]] = {}
        for row in self.tensors:
            count, nbytes = found.get(row.dtype, (0, 0))
            found[row.dtype] = (count + 1, nbytes + row.nbytes)
        return dict(sorted(found.items(), key=lambda pair: -pair[1][1]))

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        account = self.account
        return {
            "path": str(self.path),
            "format": self.format,
            "model_type": self.model_type or None,
            "files": dict(self.files),
            "sizes": dict(self.sizes),
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits_per_weight,
            "dtypes": {
                dtype: {"tensors": count, "bytes": nbytes}
                for dtype, (count, nbytes) in self.dtypes.items()
            },
            "quantisation": self.quantisation or None,
            "tokenizer": self.tokenizer or None,
            "tied": None if account is None else dict(account.tied),
            "dropped": None if account is None else dict(account.dropped),
            "problem": self.problem or None,
            "tensors": [
                {**vars(row), "shape": list(row.shape), "becomes": row.becomes or None}
                for row in self.tensors
            ],
        }
