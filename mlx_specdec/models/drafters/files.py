"""A hidden-state drafter as it is stored in a directory: its tensors, and the target it is for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...checkpoints.disk import read_json
from ...checkpoints.files import Weights
from ...checkpoints.quantization import PARTS, Quantization, stored_quantization
from ...errors import CheckpointError
from ..families import is_encoder_decoder
from .config import LayerSizes, Shapes

D2T = "d2t"
"""For each token of the drafter, the target's id minus the drafter's."""
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that repeat d2t, or that only training needs."""
MOST_TOKENS = 1 << 22
"""Tokens of a drafter's vocabulary where no file lists them."""
IN_16_BITS = ("fc", "confidence_head.proj")
"""Modules that are never quantized: everything that a drafter knows of the target goes through the
first, and the other has one row."""


class StoredTensors(Mapping[str, mx.array]):
    """The tensors of a drafter by its kind's names for them. Each is read when it is looked up, and
    lazily where the format allows it; d2t is not among them. names: to those in the files, d2t's as
    well. shapes: for quantized matrices that of the whole. quantized: the path of such a matrix ->
    how."""

    def __init__(
        self, directory: Path, readers: Mapping[str, Callable[[], mx.array]], shapes: Shapes
    ) -> None:
        self._directory, self._readers, self.shapes = directory, dict(readers), shapes
        self.names: Mapping[str, str] = {}
        self.quantized: Mapping[str, Quantization] = {}
        self._d2t = self._readers.pop(D2T, None)

    @classmethod
    def of(
        cls,
        directory: Path,
        weights: Weights | None,
        own_name: Callable[[str], str],
        unused: Collection[str] = (),
    ) -> StoredTensors:
        """Open a directory. weights: None gives no tensors. own_name: returns the kind's name of a
        tensor. unused: the kind's names of those left out. Raises CheckpointError."""
        if weights is None:
            return cls(directory, {}, {})
        left_out = {*UNUSED, *unused}
        names = {own: name for name in weights.infos if (own := own_name(name)) not in left_out}
        stored = cls(directory, {own: partial(weights.read, names[own]) for own in names}, {})
        stored.names = names
        try:
            entry = stored_quantization(read_json(directory / "config.json"))
        except CheckpointError as problem:
            raise CheckpointError(f"{directory}: {problem}") from None
        paths = [own.removesuffix(".scales") for own in names if own.endswith(".scales")]
        stored.quantized = {} if entry is None else {p: Quantization.of(entry, p) for p in paths}
        parts = {D2T, *(f"{path}.{part}" for path in stored.quantized for part in PARTS)}
        shapes = {own: weights.infos[names[own]].shape for own in names if own not in parts}
        for path, how in stored.quantized.items():
            *rows, groups = weights.infos[names[f"{path}.scales"]].shape
            shapes[f"{path}.weight"] = (*rows, groups * how.group_size)
        stored.shapes = shapes
        return stored

    @classmethod
    def made(cls, directory: Path, arrays: Mapping[str, mx.array]) -> StoredTensors:
        readers = {name: partial(arrays.__getitem__, name) for name in arrays}
        return cls(directory, readers, {name: array.shape for name, array in arrays.items()})

    def __getitem__(self, name: str) -> mx.array:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def taps(self, width: int, stated: int) -> int:
        """How many hidden states of a width `fc` reads; `stated` where there are no tensors."""
        return max(1, self.shapes["fc.weight"][1] // width) if self.shapes else stated

    def target_ids(self, count: int, vocabulary: int) -> tuple[int, ...] | None:
        """The target's token for each of `count` tokens of the drafter, None where both
        vocabularies are one. Raises CheckpointError."""
        if self._d2t is None:
            if count == vocabulary:
                return None
            if count > MOST_TOKENS:
                raise CheckpointError(f"{self._directory} asks for {count} draft tokens: check it")
            if self.shapes:
                raise CheckpointError(f"{self._directory}: weight d2t is missing: download again")
            return tuple(range(count))
        offsets = np.array(self._d2t()).astype(np.int64).reshape(count)
        ids = np.arange(count) + offsets
        if outside := [int(each) for each in ids if not 0 <= each < vocabulary]:
            raise CheckpointError(
                f"{self._directory} has a d2t that leads to token {outside[0]}, and the target has "
                f"{vocabulary}: the drafter is damaged, or belongs to another target"
            )
        return tuple(ids.tolist())


_WIDTHS = ("hidden_size", "d_model", "n_embd")
_DEPTHS = ("num_decoder_layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""The names of both in the config.json of whole models."""


@dataclass(frozen=True, kw_only=True)
class DrafterFiles:
    """A hidden-state drafter in a directory. kind: its name in the table of kinds. tapped: the
    target's layers, counted from 0, whose outputs it reads, in the order in which it puts them side
    by side; None for the kind's usual ones. taps: their number. target_width: of each. vocabulary:
    the target's, as config.json says. target_ids: the target's token for each of the drafter's;
    None where they are the same. tensors: checked, each of the shape that the kind asks for."""

    directory: Path
    kind: str
    sizes: LayerSizes
    tapped: tuple[int, ...] | None = ()
    taps: int = 0
    target_width: int
    vocabulary: int
    target_ids: tuple[int, ...] | None = None
    tensors: StoredTensors

    @property
    def drafted(self) -> int:
        """The size of the drafter's vocabulary."""
        return self.vocabulary if self.target_ids is None else len(self.target_ids)

    @property
    def inputs(self) -> int:
        """Width of the inputs of `fc`: hidden states, or one and a token's embedding."""
        return (self.taps or 2) * self.target_width

    def facts(self) -> dict[str, Any]:
        """Return what `inspect` reports."""
        return {
            "kind": self.kind,
            "target_hidden_size": self.target_width,
            "target_vocab_size": self.vocabulary,
            "draft_vocab_size": self.drafted,
            "target_layers": None if self.tapped is None else list(self.tapped),
            "taps": self.taps,
            "encoder_hidden_size": self.sizes.encoder_width,
        }

    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """The layers of a target of so many that this kind reads where no file says which."""
        return ()

    def tapped_of(self, layers: int) -> tuple[int, ...]:
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
        """Raises CheckpointError for another target. None: not known of the target."""
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
        width: of its output; None for decoder-only models."""
        its = self.sizes.encoder_width
        if its is None or its == width:
            return
        given = "is decoder-only" if width is None else f"has one of width {width}"
        raise CheckpointError(
            f"{self.directory} drafts for a target with an encoder of width {its}, and this one "
            f"{given}: the drafter belongs to another target"
        )

    def check_config(self, config: Mapping[str, Any]) -> None:
        inner = config.get("text_config"), config.get("decoder"), config
        parts = [part for part in inner if isinstance(part, Mapping)]

        def stated(names: tuple[str, ...]) -> int | None:
            values = (part[name] for part in parts for name in names if name in part)
            return next((value for value in values if type(value) is int), None)

        self.check(stated(_WIDTHS), stated(_DEPTHS), stated(("vocab_size",)))
        self.check_encoder(stated(_WIDTHS) if is_encoder_decoder(config) else None)
