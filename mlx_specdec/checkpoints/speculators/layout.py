"""What drafters have in common in their files: tapped layers, vocabularies, tensors."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ..configuration import check_weights
from ..disk.reading import read_json
from ..files import Weights
from ..keys import is_encoder_decoder
from ..quantization import Quantization, stored_quantization
from ..tensors import DTYPES
from .sizes import LayerSizes, Shapes

WIDTHS, DEPTHS = (
    ("hidden_size", "d_model", "n_embd"),
    ("num_decoder_layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer"),
)
"""What config.json of whole models calls both."""
UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What d2t says as well, and what only training needs."""
IN_16_BITS = ("fc",)
"""What is never quantized: all that a drafter knows of the target goes through it."""


@dataclass(frozen=True)
class SpeculatorFiles(ABC):
    """A drafter as it lies in a directory.

    kind: a key of KINDS. tapped: the target's layers, counted from 0, whose outputs it reads, in
    the order in which it puts them side by side; None for the kind's own choice. taps: how many
    they are. target_width: of each. vocabulary: the target's, as config.json says. target_ids: the
    target's token for each of the drafter's; None where they are the same. tensors: each of the
    shape that the kind asks for, where it is whole.
    """

    directory: Path
    kind: str
    sizes: LayerSizes
    tapped: tuple[int, ...] | None
    taps: int
    target_width: int
    vocabulary: int
    target_ids: tuple[int, ...] | None
    tensors: StoredTensors

    @property
    def encoder_width(self) -> int | None:
        """Of the target's encoder, where the drafter attends to what that puts out; else None."""
        return self.sizes.encoder_width

    def facts(self) -> dict[str, Any]:
        """What a user may want to know of it. target_layers: whose outputs it reads, counted from
        0; None for the kind's usual ones, of which there are `taps`."""
        known = len(self.target_ids) if self.target_ids is not None else self.vocabulary
        return {
            "kind": self.kind,
            "target_hidden_size": self.target_width,
            "target_vocab_size": self.vocabulary,
            "draft_vocab_size": known,
            "target_layers": None if self.tapped is None else list(self.tapped),
            "taps": self.taps,
            "encoder_hidden_size": self.encoder_width,
        }

    @abstractmethod
    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """The target's layers that this kind reads where nothing says which; see `tapped`."""

    def tapped_of(self, layers: int) -> tuple[int, ...]:
        """The layers of a target of so many that are tapped. Raises CheckpointError."""
        tapped = self.usual_layers(layers) if self.tapped is None else self.tapped
        if len(tapped) != self.taps:
            raise CheckpointError(
                f"{self.directory} reads {self.taps} hidden states side by side, and names "
                f"{len(tapped)} layers of the target: its config.json belongs to another drafter"
            )
        if wrong := [layer for layer in tapped if not 0 <= layer < layers]:
            raise CheckpointError(
                f"{self.directory} reads what layer {wrong[0]} of the target puts out, and the "
                f"target has layers 0 to {layers - 1}: the drafter belongs to another target"
            )
        return tapped

    def check(self, width: int | None, layers: int | None, vocabulary: int | None) -> None:
        """Raises CheckpointError for a target that this drafter was not made for. None: that is not
        known of the target."""
        for what, its, the_targets in (
            ("hidden states of width", self.target_width, width),
            ("a vocabulary of", self.vocabulary, vocabulary),
        ):
            if the_targets is not None and its != the_targets:
                raise CheckpointError(
                    f"{self.directory} drafts for a target with {what} {its}, and this one has "
                    f"{the_targets}: the drafter belongs to another target"
                )
        if layers is not None:
            self.tapped_of(layers)

    def check_encoder(self, width: int | None) -> None:
        """Raises CheckpointError for a target without the encoder that this drafter attends to.

        width: of what the target's encoder puts out; None for decoder-only models."""
        its = self.encoder_width
        if its is None or its == width:
            return
        kept = "is decoder-only" if width is None else f"has one of width {width}"
        raise CheckpointError(
            f"{self.directory} drafts for a target with an encoder of width {its}, and this one "
            f"{kept}: the drafter belongs to another target"
        )

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Both with what the config.json of a target says."""
        inner = config.get("text_config")
        parts = [part for part in (inner, config) if isinstance(part, Mapping)]

        def said(names: tuple[str, ...]) -> int | None:
            values = (part[name] for part in parts for name in names if name in part)
            return next((value for value in values if type(value) is int), None)

        self.check(said(WIDTHS), said(DEPTHS), said(("vocab_size",)))
        self.check_encoder(said(WIDTHS) if is_encoder_decoder(config) else None)


class StoredTensors(Mapping[str, mx.array]):
    """A drafter's tensors by its kind's names for them, each read when it is asked for, and lazily
    where the format allows it; d2t is not among them.

    names: in the files, d2t's as well. shapes: of quantized matrices that of the whole. quantized:
    path of such a matrix -> how.
    """

    def __init__(
        self,
        weights: Weights,
        names: Mapping[str, str],
        shapes: Shapes,
        quantized: Mapping[str, Quantization],
    ) -> None:
        self._weights, self.names = weights, names
        self.shapes, self.quantized = shapes, quantized
        self._here = True

    def __getitem__(self, name: str) -> mx.array:
        place = self.names[name]
        return self._weights.read(place) if self._here else self._weights.tensor(place).outline

    def __contains__(self, name: object) -> bool:
        return name in self.names and name != "d2t"

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name != "d2t")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def outlined(self) -> StoredTensors:
        """The same as zeros, whose files may go."""
        made = copy.copy(self)
        made._here = False
        return made

    def expanded(self) -> dict[str, mx.array]:
        """All of them, with whole matrices in float32 in the place of quantized ones."""
        plain = {name: self[name] for name in self if name.rpartition(".")[0] not in self.quantized}
        for path, how in self.quantized.items():
            parts = (self.get(f"{path}.{part}") for part in ("weight", "scales", "biases"))
            weight, scales, biases = parts
            assert weight is not None and scales is not None, "they were checked"
            plain[f"{path}.weight"] = how.dequantize(weight, scales, biases)
        return plain


class Stored:
    """The tensors of a drafter's directory under the names that its kind has for them.

    own_name: of a tensor, from its name in the file. unread: own names of what is passed over.
    Raises CheckpointError for files that are damaged.
    """

    def __init__(
        self, directory: Path, own_name: Callable[[str], str], unread: Collection[str] = ()
    ) -> None:
        self.directory = directory
        self._weights = Weights(directory)
        named = {own_name(name): name for name in self._weights.infos}
        self._names = {own: name for own, name in named.items() if own not in (*UNREAD, *unread)}
        self._quantized = self._quantization()
        self.shapes = {
            own: self._shape(own)
            for own in self._names
            if own.rpartition(".")[0] not in self._quantized or own.endswith(".weight")
        }

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
        for own, name in self._names.items():
            stored, wanted = self._weights.infos[name].dtype, "floats"
            kind = mx.floating
            path, _, part = own.rpartition(".")
            if own == "d2t" or (part == "weight" and path in self._quantized):
                kind, wanted = mx.integer, "whole numbers"
            if not mx.issubdtype(DTYPES[stored], kind):
                raise CheckpointError(
                    f"{self.directory} stores {name} as {stored}: these have to be {wanted}"
                )

    def target_ids(self, count: int, vocabulary: int) -> tuple[int, ...] | None:
        """The target's token for each of `count` of the drafter's: d2t says how far it is off."""
        if "d2t" not in self._names:
            return None
        offsets = np.array(self._weights.read(self._names["d2t"])).astype(np.int64)
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

    def read(self) -> StoredTensors:
        """All but d2t."""
        return StoredTensors(self._weights, self._names, self.shapes, self._quantized)

    def _quantization(self) -> dict[str, Quantization]:
        """What config.json says of the matrices that have scales. Raises CheckpointError."""
        paths = [own.removesuffix(".scales") for own in self._names if own.endswith(".scales")]
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
        shape = self._weights.infos[self._names[own]].shape
        path, _, part = own.rpartition(".")
        how = self._quantized.get(path)
        if how is None or part != "weight":
            return shape
        parts = [self._names.get(f"{path}.{part}", "") for part in how.parts]
        shapes = {self._weights.infos[name].shape if name else () for name in parts}
        groups = next(iter(shapes))[-1:]
        whole = (*shape[:-1], *(each * how.group_size for each in groups))
        packed = (*shape[:-1], *(each * how.bits // 32 for each in whole[-1:]))
        if len(shapes) > 1 or not groups or packed != shape or shapes != {(*shape[:-1], *groups)}:
            raise CheckpointError(
                f"{self.directory}: {path} is not quantized as config.json says: the drafter is "
                "damaged"
            )
        return whole
