"""What a drafter's config.json says, name by name, each value looked at before it is believed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...checkpoints.configuration import check_weights
from ...checkpoints.disk import read_json
from ...checkpoints.files import Weights
from ...checkpoints.quantization import PARTS, Quantization, stored_quantization
from ...checkpoints.t5_keys import is_encoder_decoder
from ...checkpoints.tensors import DTYPES, TensorInfo
from ...errors import CheckpointError
from .sizes import ATTENDS, LayerSizes, Settings, Shapes, Sizes, is_named

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


WIDTHS, DEPTHS = (
    ("hidden_size", "d_model", "n_embd"),
    ("num_decoder_layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer"),
)
"""What config.json of whole models calls both."""


@dataclass(frozen=True)
class SpeculatorFiles:
    """A drafter as it lies in a directory.

    kind: a key of KINDS. tapped: the target's layers, counted from 0, whose outputs it reads, in
    the order in which it puts them side by side; None for the kind's own choice. taps: how many
    they are. target_width: of each. vocabulary: the target's, as config.json says. target_ids: the
    target's token for each of the drafter's; None where they are the same. tensors: each of the
    shape that the kind asks for, where it is whole. without_encoder: config.json says that the
    target has none.
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
        """Of the target's encoder, where the drafter attends to what that puts out; else None."""
        sizes = self.sizes
        return sizes.encoder_width if isinstance(sizes, LayerSizes) else None

    @property
    def inputs(self) -> int:
        """Width of what `fc` is given."""
        return self.tensors.shapes["fc.weight"][1]

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

    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """The target's layers that this kind reads where nothing says which; see `tapped`. None for
        kinds that read what the target's head is given."""
        return ()

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
        """Raises CheckpointError for a target without the encoder that this drafter attends to, or
        with one where its own target has none.

        width: of what the target's encoder puts out; None for decoder-only models."""
        its = self.encoder_width
        if its == width or (its is None and not self.without_encoder):
            return
        own = "without an encoder" if its is None else f"with an encoder of width {its}"
        kept = "is decoder-only" if width is None else f"has one of width {width}"
        raise CheckpointError(
            f"{self.directory} drafts for a target {own}, and this one {kept}: the drafter belongs "
            "to another target"
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


def without_encoder(file: Path, config: Mapping[str, Any]) -> bool:
    """Whether the config.json of a drafter says that its target has no encoder: in our own word, or
    by the target's architecture, which `speculators` writes down."""
    if Settings(file, config.get("transformer_layer_config"), config).get(ATTENDS) is False:
        return True
    verifier = Settings(file, config.get("speculators_config")).get("verifier")
    return is_named(verifier, r"\w+ForCausalLM") if isinstance(verifier, Mapping) else False
