"""The tensors of a drafter's directory, under the names that its kind has for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ..configuration import check_weights
from ..disk.reading import read_json
from ..files import Weights
from ..quantization import PARTS, Quantization, stored_quantization
from ..tensors import DTYPES, TensorInfo
from .sizes import Shapes

D2T = "d2t"
"""How far the target's token is off each of the drafter's."""
UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What d2t says as well, and what only training needs."""
TOKENS = (D2T, "masked_embedding.token_ordering")
"""What holds tokens of the target."""
IN_16_BITS = ("fc", "confidence_head.proj")
"""What is never quantized: all that a drafter knows of the target goes through the first, and the
other has one row."""


class StoredTensors(Mapping[str, mx.array]):
    """A drafter's tensors by its kind's names for them, each read when it is asked for, and lazily
    where the format allows it; d2t is not among them.

    names: in the files, d2t's as well. infos, read: of these. shapes: of quantized matrices that of
    the whole. quantized: path of such a matrix -> how. Raises CheckpointError for files that are
    damaged.
    """

    def __init__(
        self,
        directory: Path,
        names: Mapping[str, str],
        infos: Mapping[str, TensorInfo],
        read: Callable[[str], mx.array],
    ) -> None:
        self.directory, self.names = directory, names
        self._infos, self._read = infos, read
        self.quantized = self._quantization()
        extra = {f"{path}.{part}" for path in self.quantized for part in PARTS}
        self.shapes: Shapes = {own: self._shape(own) for own in self.names if own not in extra}
        self._made: Mapping[str, mx.array] = {}
        self._hidden = {D2T}

    @classmethod
    def of(
        cls, directory: Path, own_name: Callable[[str], str], unread: Collection[str] = ()
    ) -> StoredTensors:
        """Of a directory. own_name: of a tensor, from its name in the file. unread: own names of
        what is passed over."""
        weights, passed = Weights(directory), (*UNREAD, *unread)
        named = {own_name(name): name for name in weights.infos}
        names = {own: name for own, name in named.items() if own not in passed}
        return cls(directory, names, weights.infos, weights.read)

    @classmethod
    def made(cls, directory: Path, arrays: Mapping[str, mx.array]) -> StoredTensors:
        """Of arrays that no file has as they are."""
        return cls(directory, {}, {}, arrays.__getitem__).changed(arrays)

    def changed(
        self, arrays: Mapping[str, mx.array], without: Collection[str] = ()
    ) -> StoredTensors:
        """The same with these arrays in the place of those in the files, and without some."""
        made = copy.copy(self)
        made._made = {**self._made, **arrays}
        made._hidden = {*self._hidden, *without}
        made.shapes = {**self.shapes, **{name: array.shape for name, array in arrays.items()}}
        return made

    def outlined(self) -> StoredTensors:
        """The same as zeros, whose files may go."""
        made, infos = copy.copy(self), self._infos
        made._read = lambda place: mx.zeros(infos[place].shape, DTYPES[infos[place].dtype])
        return made

    def __getitem__(self, name: str) -> mx.array:
        return self._made[name] if name in self._made else self._read(self.names[name])

    def __contains__(self, name: object) -> bool:
        return (name in self.names or name in self._made) and name not in self._hidden

    def __iter__(self) -> Iterator[str]:
        return (name for name in {**self.names, **self._made} if name not in self._hidden)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def expanded(self) -> dict[str, mx.array]:
        """All of them, with whole matrices in float32 in the place of quantized ones."""
        whole = set(self.shapes) - {f"{path}.weight" for path in self.quantized}
        plain = {name: self[name] for name in self if name in whole}
        for path, how in self.quantized.items():
            weight, scales, biases = (self.get(f"{path}.{part}") for part in ("weight", *PARTS))
            assert weight is not None and scales is not None, "they were checked"
            plain[f"{path}.weight"] = how.dequantize(weight, scales, biases)
        return plain

    def check_layers(self, count: int) -> None:
        """Raises CheckpointError where config.json asks for more layers than can be."""
        tensors = len(self.shapes)
        if count > tensors:
            raise CheckpointError(
                f"{self.directory} asks for {count} layers, and there are {tensors} tensors"
            )

    def check(self, needed: Shapes, optional: Shapes) -> None:
        """Raises CheckpointError for the first tensor missing, left over, or of another shape."""
        present = {name: shape for name, shape in optional.items() if name in self.shapes}
        try:
            check_weights({**needed, **present}, self.shapes)
        except CheckpointError as problem:
            raise CheckpointError(f"{self.directory}: {problem}") from None
        for own, name in self.names.items():
            stored, wanted = self._infos[name].dtype, "floats"
            kind = mx.floating
            path, _, part = own.rpartition(".")
            if own in TOKENS or (part == "weight" and path in self.quantized):
                kind, wanted = mx.integer, "whole numbers"
            if not mx.issubdtype(DTYPES[stored], kind):
                raise CheckpointError(
                    f"{self.directory} stores {name} as {stored}: these have to be {wanted}"
                )

    def target_ids(self, count: int, vocabulary: int) -> tuple[int, ...] | None:
        """The target's token for each of `count` of the drafter's: d2t says how far it is off."""
        if D2T not in self.names:
            return None
        offsets = np.array(self._read(self.names[D2T])).astype(np.int64)
        ids = np.arange(count) + offsets
        if outside := [int(one) for one in ids if not 0 <= one < vocabulary]:
            raise CheckpointError(
                f"{self.directory} has a d2t that leads to token {outside[0]}, and the target has "
                f"{vocabulary}: the drafter is damaged, or belongs to another target"
            )
        if len(np.unique(ids)) < count:
            raise CheckpointError(
                f"{self.directory} has a d2t that leads to one token twice: the drafter is damaged"
            )
        return tuple(ids.tolist())

    def _quantization(self) -> dict[str, Quantization]:
        """What config.json says of the matrices that have scales. Raises CheckpointError."""
        if not self.names:
            return {}
        paths = [own.removesuffix(".scales") for own in self.names if own.endswith(".scales")]
        try:
            entry = stored_quantization(read_json(self.directory / "config.json"))
        except CheckpointError as problem:
            raise CheckpointError(f"{self.directory}: {problem}") from None
        if entry is not None and (kept := [path for path in paths if path in IN_16_BITS]):
            raise CheckpointError(
                f"{self.directory} has quantized {kept[0]}, which drafters keep in 16 bits: "
                "convert the drafter again"
            )
        return {} if entry is None else {path: Quantization.of(entry, path) for path in paths}

    def _shape(self, own: str) -> tuple[int, ...]:
        """Of the whole, where it is quantized. Raises CheckpointError for parts that do not fit."""
        shape = self._infos[self.names[own]].shape
        path, _, part = own.rpartition(".")
        how = self.quantized.get(path)
        if how is None or part != "weight":
            return shape
        parts = [self.names.get(f"{path}.{part}", "") for part in how.parts]
        shapes = {self._infos[name].shape if name else () for name in parts}
        groups = next(iter(shapes))[-1:]
        whole = (*shape[:-1], *(each * how.group_size for each in groups))
        packed = (*shape[:-1], *(each * how.bits // 32 for each in whole[-1:]))
        if len(shapes) > 1 or not groups or packed != shape or shapes != {(*shape[:-1], *groups)}:
            raise CheckpointError(
                f"{self.directory}: {path} is not quantized as config.json says: the drafter is "
                "damaged"
            )
        return whole
