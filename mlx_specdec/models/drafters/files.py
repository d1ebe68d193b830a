"""A hidden-state drafter as it is stored in a directory: its tensors, and the target it is for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...checkpoints.disk import read_json
from ...checkpoints.files import Weights
from ...checkpoints.quantization import PARTS, Quantization, stored_quantization
from ...checkpoints.t5_keys import is_encoder_decoder
from ...checkpoints.tensors import DTYPES, TensorInfo, check_weights
from ...errors import CheckpointError
from .config import ATTENDS, LayerSizes, Settings, Shapes, Sizes, is_named

D2T = "d2t"
"""For each token of the drafter, the target's id minus the drafter's."""
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that repeat d2t, or that only training needs."""
TOKENS = (D2T, "masked_embedding.token_ordering")
"""Tensors that hold token ids of the target."""
IN_16_BITS = ("fc", "confidence_head.proj")
"""Modules that are never quantized: everything that a drafter knows of the target goes through the
first, and the other has one row."""


class StoredTensors(Mapping[str, mx.array]):
    """The tensors of a drafter by its kind's names for them. Each is read when it is looked up, and
    lazily where the format allows it; d2t is not among them.

    names: the kind's name -> the name in the files, d2t's as well. infos: of the names in the
    files. read: returns the array of such a name. shapes: for quantized matrices that of the whole.
    quantized: the path of such a matrix -> how. Raises CheckpointError for files that are damaged.
    """

    def __init__(
        self,
        directory: Path,
        names: Mapping[str, str],
        infos: Mapping[str, TensorInfo],
        read: Callable[[str], mx.array],
    ) -> None:
        self.directory, self.names = directory, names
        self._infos = {own: infos[name] for own, name in names.items()}
        self._read = read
        # Where each is: a name in the files, or an array in the place of what is there.
        self._places: dict[str, str | mx.array] = {own: names[own] for own in names if own != D2T}
        self.quantized = self._quantization()
        parts = {f"{path}.{part}" for path in self.quantized for part in PARTS}
        self.shapes: Shapes = {own: self._shape(own) for own in names if own not in parts}

    @classmethod
    def of(
        cls, directory: Path, own_name: Callable[[str], str], unused: Collection[str] = ()
    ) -> StoredTensors:
        """Open a directory. own_name: returns the kind's name of a tensor for that in the files.
        unused: the kind's names of tensors that are left out."""
        weights = Weights(directory)
        names = {own_name(name): name for name in weights.infos}
        left_out = (*UNUSED, *unused)
        used = {own: name for own, name in names.items() if own not in left_out}
        return cls(directory, used, weights.infos, weights.read)

    @classmethod
    def made(cls, directory: Path, arrays: Mapping[str, mx.array]) -> StoredTensors:
        """Take arrays that were computed from those of the files."""
        return cls(directory, {}, {}, arrays.__getitem__).changed(arrays)

    def changed(
        self, arrays: Mapping[str, mx.array], without: Collection[str] = ()
    ) -> StoredTensors:
        """Return the same tensors with these arrays added or replaced, and without some."""
        changed = copy.copy(self)
        places = {**self._places, **arrays}
        changed._places = {name: place for name, place in places.items() if name not in without}
        changed.shapes = self.shapes | {name: array.shape for name, array in arrays.items()}
        return changed

    def outlined(self) -> StoredTensors:
        """Return the same tensors as zeros, so that the files may be deleted."""
        infos = ((name, self._infos[name]) for name in self if name in self._infos)
        zeros = {name: mx.zeros(info.shape, DTYPES[info.dtype]) for name, info in infos}
        changed = copy.copy(self)
        changed._places = {**self._places, **zeros}
        return changed

    def __getitem__(self, name: str) -> mx.array:
        place = self._places[name]
        return self._read(place) if isinstance(place, str) else place

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def expanded(self) -> dict[str, mx.array]:
        """Return all tensors, with whole matrices in float32 in place of quantized ones."""
        quantized = {f"{path}.{part}" for path in self.quantized for part in ("weight", *PARTS)}
        plain = {name: self[name] for name in self if name not in quantized}
        for path, how in self.quantized.items():
            weight, scales = self[f"{path}.weight"], self[f"{path}.scales"]
            plain[f"{path}.weight"] = how.dequantize(weight, scales, self.get(f"{path}.biases"))
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
        for own, info in self._infos.items():
            kind, wanted = mx.floating, "floats"
            path, _, part = own.rpartition(".")
            if own in TOKENS or (part == "weight" and path in self.quantized):
                kind, wanted = mx.integer, "whole numbers"
            if not mx.issubdtype(DTYPES[info.dtype], kind):
                raise CheckpointError(
                    f"{self.directory} stores {self.names[own]} as {info.dtype}: these have to be "
                    f"{wanted}"
                )

    def matrix_width(self, name: str, problem: str) -> int:
        """Return the second axis of a matrix. Raises CheckpointError with the problem where there
        is no such matrix."""
        shape = self.shapes.get(name, ())
        if len(shape) != 2:
            raise CheckpointError(f"{self.directory} has no matrix {name}: {problem}")
        return shape[1]

    def target_ids(self, count: int, vocabulary: int) -> tuple[int, ...] | None:
        """Return the target's token for each of `count` tokens of the drafter, None without d2t.
        Raises CheckpointError."""
        if D2T not in self.names:
            return None
        ids = np.arange(count) + np.array(self._read(self.names[D2T])).astype(np.int64)
        if outside := [int(each) for each in ids if not 0 <= each < vocabulary]:
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
        """Return what config.json says of the matrices that have scales. Raises CheckpointError."""
        if not self.names:
            return {}
        paths = [own.removesuffix(".scales") for own in self.names if own.endswith(".scales")]
        try:
            entry = stored_quantization(read_json(self.directory / "config.json"))
        except CheckpointError as problem:
            raise CheckpointError(f"{self.directory}: {problem}") from None
        if entry is None:
            return {}
        if wrong := [path for path in paths if path in IN_16_BITS]:
            raise CheckpointError(
                f"{self.directory} has quantized {wrong[0]}, which drafters keep in 16 bits: "
                "convert the drafter again"
            )
        return {path: Quantization.of(entry, path) for path in paths}

    def _shape(self, own: str) -> tuple[int, ...]:
        """Return the shape of the whole, where it is quantized. Raises CheckpointError for parts
        that do not fit one another."""
        shape = self._infos[own].shape
        path, _, part = own.rpartition(".")
        how = self.quantized.get(path)
        if how is None or part != "weight":
            return shape
        parts = [self._infos.get(f"{path}.{part}") for part in how.parts]
        shapes = {() if info is None else info.shape for info in parts}
        groups = next(iter(shapes))[-1:]
        whole = (*shape[:-1], *(each * how.group_size for each in groups))
        packed = (*shape[:-1], *(each * how.bits // 32 for each in whole[-1:]))
        if len(shapes) > 1 or not groups or packed != shape or shapes != {(*shape[:-1], *groups)}:
            raise CheckpointError(
                f"{self.directory}: {path} is not quantized as config.json says: the drafter is "
                "damaged"
            )
        return whole


_WIDTHS = ("hidden_size", "d_model", "n_embd")
_DEPTHS = ("num_decoder_layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""The names of both in the config.json of whole models."""


@dataclass(frozen=True)
class DrafterFiles:
    """A hidden-state drafter in a directory.

    kind: its name in the table of kinds. tapped: the target's layers, counted from 0, whose outputs
    it reads, in the order in which it puts them side by side; None for the kind's usual ones. taps:
    their number. target_width: of each. vocabulary: the target's, as config.json says. target_ids:
    the target's token for each of the drafter's; None where they are the same. tensors: checked,
    each of the shape that the kind asks for. without_encoder: config.json says that the target has
    no encoder.
    """

    directory: Path
    kind: str
    sizes: Sizes
    tapped: tuple[int, ...] | None
    taps: int
    target_width: int
    vocabulary: int
    target_ids: tuple[int, ...] | None
    tensors: StoredTensors
    without_encoder: bool = field(default=False, kw_only=True)

    @property
    def encoder_width(self) -> int | None:
        """Width of the output of the target's encoder, None where layers do not attend to it."""
        sizes = self.sizes
        return sizes.encoder_width if isinstance(sizes, LayerSizes) else None

    @property
    def inputs(self) -> int:
        """Width of the inputs of `fc`."""
        return self.tensors.shapes["fc.weight"][1]

    def facts(self) -> dict[str, Any]:
        """Return what `inspect` reports. target_layers: whose outputs it reads, counted from 0;
        None for the kind's usual ones, of which there are `taps`."""
        ids = self.target_ids
        return {
            "kind": self.kind,
            "target_hidden_size": self.target_width,
            "target_vocab_size": self.vocabulary,
            "draft_vocab_size": self.vocabulary if ids is None else len(ids),
            "target_layers": None if self.tapped is None else list(self.tapped),
            "taps": self.taps,
            "encoder_hidden_size": self.encoder_width,
        }

    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """Return the layers of a target of so many that this kind reads where no file says which;
        none for kinds that read the inputs of the target's head."""
        return ()

    def tapped_of(self, layers: int) -> tuple[int, ...]:
        """Return the tapped layers of a target of so many. Raises CheckpointError."""
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
        """Raises CheckpointError for a target that this drafter was not made for. None: not known
        of the target."""
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
        """Raises CheckpointError for a target without the encoder that this drafter attends to, or
        with one where its own target has none.

        width: of the output of the target's encoder; None for decoder-only models."""
        its = self.encoder_width
        if its == width or (its is None and not self.without_encoder):
            return
        wanted = "without an encoder" if its is None else f"with an encoder of width {its}"
        given = "is decoder-only" if width is None else f"has one of width {width}"
        raise CheckpointError(
            f"{self.directory} drafts for a target {wanted}, and this one {given}: the drafter "
            "belongs to another target"
        )

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Check the target and its encoder by the target's config.json. Raises CheckpointError."""
        inner = config.get("text_config")
        parts = [part for part in (inner, config) if isinstance(part, Mapping)]

        def stated(names: tuple[str, ...]) -> int | None:
            values = (part[name] for part in parts for name in names if name in part)
            return next((value for value in values if type(value) is int), None)

        self.check(stated(_WIDTHS), stated(_DEPTHS), stated(("vocab_size",)))
        self.check_encoder(stated(_WIDTHS) if is_encoder_decoder(config) else None)


def without_encoder(file: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the config.json of a drafter says that its target has no encoder: in this
    package's own name, or by the target's architecture, which `speculators` writes down."""
    if Settings(file, config.get("transformer_layer_config"), config).get(ATTENDS) is False:
        return True
    verifier = Settings(file, config.get("speculators_config")).get("verifier")
    return is_named(verifier, r"\w+ForCausalLM") if isinstance(verifier, Mapping) else False
