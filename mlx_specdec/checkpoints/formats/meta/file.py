"""Meta's consolidated.NN.pth, one or several parts, as a set of tensors under Hugging Face's names.

Knows how tensor-parallel parts make a whole. What a part holds is read by `torch.file`, what is
expected of it is said by `layout` and params.json. Parts are joined and rotary rows put in
order as rows are asked for: no more than these is ever in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ....errors import CheckpointError
from ...shards import META
from ...tensors import Tensor, same
from ..reader import Contents, Reader, TensorInfo
from ..safetensors import DTYPES
from ..torch.file import TorchFile
from .layout import EMBEDDING, HEAD, Entry, configuration, entries, rotary_rows
from .params import PARAMS, Params, read_params

_PART = re.compile(r"consolidated\.(\d{2,4})\.pth")
_QUERIES = "layers.0.attention.wq.weight"
_FLOATING = ("F32", "F16", "BF16")
_DROPPED = re.compile(r"rope\.freqs|.*\.inner_attention\.rope\.freqs")
"""Tables that follow from params.json."""


@dataclass(frozen=True)
class _Whole:
    """One tensor of all parts. axis: along which they are joined, None for a copy in each."""

    entry: Entry
    axis: int | None


class MetaFile:
    """The tensors of one model.

    infos: type and shape of every tensor, joined; a head that repeats the embedding is left out.
    config: what config.json would say. scaled: whether positions are stretched, as since
    Llama 3.1. paths: all parts.
    """

    def __init__(self, file: Path) -> None:
        """file: the first part, the others and params.json beside it. Raises CheckpointError for a
        missing part, and for parts or a params.json that contradict each other."""
        self.paths = parts_of(file)
        self._parts = [TorchFile(path) for path in self.paths]
        params = read_params(file.parent / PARAMS)
        self._check_count(params)
        sizes = params.sizes(self._vocabulary())
        layers, most = sizes.layers, len(self._parts[0].infos)
        if layers > most:
            raise CheckpointError(
                f"{file.parent / PARAMS} asks for {layers} layers, and {file.name} has {most} "
                "tensors"
            )
        asked = entries(sizes)
        if HEAD not in self._parts[0].infos:
            del asked["lm_head.weight"]
        self._wholes = {ours: self._whole(entry) for ours, entry in asked.items()}
        self._check_extra()
        self._check_copies()
        infos = {ours: self._info(whole) for ours, whole in self._wholes.items()}
        self.infos: Mapping[str, TensorInfo] = infos
        tied = self._is_tied()
        if tied:
            infos.pop("lm_head.weight", None)
        self.scaled = params.scaled_by is not None
        self.config: Mapping[str, Any] = {
            **configuration(
                sizes,
                stored=self.infos["model.embed_tokens.weight"].dtype,
                epsilon=params.epsilon,
                theta=params.theta,
                length=params.length,
                tied=tied,
            ),
            **params.scaling,
        }

    @property
    def contents(self) -> Contents:
        """What the parts hold under Meta's names, joined."""
        stored = {whole.entry.theirs: self._info(whole) for whole in self._wholes.values()}
        tables = {
            name: info
            for part in self._parts
            for name, info in part.infos.items()
            if _DROPPED.fullmatch(name)
        }
        tied = HEAD in stored and "lm_head.weight" not in self.infos
        return Contents(
            {**stored, **tables},
            {ours: self._wholes[ours].entry.theirs for ours in self.infos},
            {HEAD: EMBEDDING} if tied else {},
            dict.fromkeys(tables, f"it follows from {PARAMS}"),
        )

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Entries begin .. end - 1 of a tensor along its first axis; read now."""
        whole = self._wholes[name]
        if not whole.entry.heads:
            return self._joined(whole, begin, end)
        width = whole.entry.shape[0] // whole.entry.heads
        first, last = begin // width * width, -(-end // width) * width
        places = mx.array(rotary_rows(begin, end, width) - first)
        return self._joined(whole, first, last)[places]

    def _joined(self, whole: _Whole, begin: int, end: int) -> mx.array:
        """Rows in Meta's order."""
        theirs = whole.entry.theirs
        if whole.axis is None:
            return self._parts[0].rows(theirs, begin, end)
        if whole.axis == 1:
            return mx.concatenate([part.rows(theirs, begin, end) for part in self._parts], axis=1)
        each = whole.entry.shape[0] // len(self._parts)
        pieces = []
        for number in range(begin // each, -(-end // each)):
            low, high = max(begin - number * each, 0), min(end - number * each, each)
            pieces.append(self._parts[number].rows(theirs, low, high))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=0)

    def _check_count(self, params: Params) -> None:
        """Raises CheckpointError where the last parts are missing: the first tensor tells."""
        info = self._parts[0].infos.get(_QUERIES)
        count, rows = len(self._parts), info.shape[0] if info is not None and info.shape else 0
        if rows and params.queries % rows == 0 and params.queries // rows > count:
            raise CheckpointError(
                f"{self.paths[0].parent} has {count} of the {params.queries // rows} parts that "
                f"{PARAMS} asks for: the rest is missing, or that file is another model's"
            )

    def _vocabulary(self) -> int:
        """Tokens: the head is cut along them by every generation, the embedding only since the
        third, where a part of it then has as many rows as one of the head."""
        infos, path = self._parts[0].infos, self.paths[0]
        for name in (HEAD, EMBEDDING):
            if name in infos:
                if len(infos[name].shape) != 2:
                    raise CheckpointError(f"{path} has {name} of shape {infos[name].shape}")
                return infos[name].shape[0] * len(self._parts)
        raise CheckpointError(f"{path} lacks {EMBEDDING}: it is not a Llama of Meta's")

    def _whole(self, entry: Entry) -> _Whole:
        """How the parts of a tensor make one. Raises CheckpointError where they do not."""
        shapes = []
        for path, part in zip(self.paths, self._parts, strict=True):
            info = part.infos.get(entry.theirs)
            if info is None:
                raise CheckpointError(f"{path} lacks {entry.theirs}: download it again")
            if info.dtype not in _FLOATING or info.dtype != self._dtype(entry):
                raise CheckpointError(f"{path} stores {entry.theirs} as {info.dtype}")
            shapes.append(info.shape)
        # Before Llama 3 each part had some columns of every token's embedding.
        axes = (entry.axis, 1) if entry.theirs == EMBEDDING else (entry.axis,)
        for axis in axes:
            if all(shape == self._cut(entry, axis) for shape in shapes):
                return _Whole(entry, axis)
        raise CheckpointError(self._mismatch(entry, shapes))

    def _dtype(self, entry: Entry) -> str:
        return self._parts[0].infos[entry.theirs].dtype

    def _cut(self, entry: Entry, axis: int | None) -> tuple[int, ...]:
        """The shape of one part, () where the tensor cannot be cut so."""
        shape = list(entry.shape)
        if axis is not None:
            if shape[axis] % len(self._parts):
                return ()
            shape[axis] //= len(self._parts)
        return tuple(shape)

    def _mismatch(self, entry: Entry, shapes: list[tuple[int, ...]]) -> str:
        found = " and ".join(map(str, sorted(set(shapes))[:3]))
        parts = "" if len(shapes) == 1 else f" in each of {len(shapes)} parts"
        return (
            f"{self.paths[0].parent}: {entry.theirs} has shape {found}{parts} where {PARAMS} asks "
            f"for {entry.shape} in all"
        )

    def _check_extra(self) -> None:
        known = {whole.entry.theirs for whole in self._wholes.values()}
        for path, part in zip(self.paths, self._parts, strict=True):
            extra = sorted(n for n in part.infos.keys() - known if not _DROPPED.fullmatch(n))
            if extra:
                raise CheckpointError(
                    f"{path} holds {extra[0]!a:.200}, which {PARAMS} does not ask for"
                )

    def _check_copies(self) -> None:
        """What each part has whole has to be the same in all."""
        for whole in self._wholes.values():
            if whole.axis is None:
                first, *rest = (_tensor(part, whole.entry.theirs) for part in self._parts)
                if not all(same(first, other) for other in rest):
                    raise CheckpointError(
                        f"{self.paths[0].parent} holds parts of different models: their "
                        f"{whole.entry.theirs} differ"
                    )

    def _info(self, whole: _Whole) -> TensorInfo:
        dtype, shape = self._dtype(whole.entry), whole.entry.shape
        return TensorInfo(dtype, shape, math.prod(shape) * DTYPES[dtype].size)

    def _is_tied(self) -> bool:
        """Whether there is no output head, or one that repeats the embedding."""
        if "lm_head.weight" not in self.infos:
            return True
        return same(_tensor(self, "lm_head.weight"), _tensor(self, "model.embed_tokens.weight"))


def parts_of(file: Path) -> list[Path]:
    """All parts of a model in order, whichever of them is given. Raises CheckpointError where one
    is missing between others, or the first."""
    found = {}
    for path in file.parent.glob(META):
        name = _PART.fullmatch(path.name)
        if name is not None:
            found[int(name[1])] = path
    if not found:
        raise CheckpointError(f"{file} is not called consolidated.NN.pth: Meta's parts are")
    for number in range(max(found)):
        if number not in found:
            raise CheckpointError(
                f"{file.parent} lacks consolidated.{number:02d}.pth: download the model again"
            )
    return [found[number] for number in sorted(found)]


def _tensor(reader: Reader, name: str) -> Tensor:
    info = reader.infos[name]
    return Tensor(DTYPES[info.dtype], info.shape, partial(reader.rows, name))
