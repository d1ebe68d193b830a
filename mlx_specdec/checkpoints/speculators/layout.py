"""What drafters have in common in their files: the target that they were made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..keys import is_encoder_decoder
from .settings import Settings, is_named
from .sizes import ATTENDS, LayerSizes, Sizes
from .stored import StoredTensors

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
