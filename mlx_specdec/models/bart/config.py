"""config.json of BART or its kin -> its shapes and switches, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...checkpoints.files import whole_number
from ...checkpoints.tensors import MOST_LAYERS
from ...errors import CheckpointError
from ..encoder_decoder.layers import ACTIVATIONS

OFFSET = 2
"""Rows of a learned table of positions that lie before the first one's."""


@dataclass(frozen=True)
class Switches:
    """What the kinds differ in, and what their config.json may leave out.

    norm_first: a layer norms the input of each part, otherwise the sum after it. stack_norm: a norm
    ends each stack. embedding_norm: a norm follows the embedding. positions: a learned table, sines
    and cosines as Marian has them, or those of M2M100. bias: logits have one."""

    norm_first: bool
    stack_norm: bool
    embedding_norm: bool
    positions: Literal["learned", "marian", "m2m"]
    bias: bool = True
    activation: str = "gelu"
    scales: bool = False
    pad: int | None = 1
    start: int | None = 2
    end: int = 2


KINDS = {
    "bart": Switches(False, False, True, "learned"),
    "mbart": Switches(True, True, True, "learned", start=None),
    "marian": Switches(False, False, False, "marian", pad=None, start=None, end=0),
    "m2m_100": Switches(True, True, False, "m2m", bias=False, activation="relu", scales=True),
    "pegasus": Switches(True, True, False, "marian", pad=0, start=0, end=1),
}
"""By model_type; NLLB's is m2m_100."""


class StackShape(NamedTuple):
    """One stack: its layers, their heads, and the width inside their feed-forward networks."""

    layers: int
    heads: int
    inner: int


@dataclass(frozen=True)
class BartConfig:
    """Shapes and switches of one model. vocab_size: of the decoder, source_size: of the encoder;
    shared: both have one table. max_length: positions of a source, and of a text. scales: the
    embedding by the root of its width. start: the first tokens of every text, forced ones among
    them. needs_language: a text begins with that of its language; in_place: and with no other.
    banned: tokens that no text has."""

    switches: Switches
    vocab_size: int
    source_size: int
    shared: bool
    d_model: int
    encoder: StackShape
    decoder: StackShape
    activation: str
    max_length: int
    scales: bool
    pad: int
    end: int
    start: tuple[int, ...]
    needs_language: bool
    in_place: bool
    banned: tuple[int, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> BartConfig:
        """Raises CheckpointError for what no model of these kinds is."""
        kind = config["model_type"]
        switches = KINDS[kind]
        source_size = whole_number(config, "vocab_size")
        size = whole_number(config, "decoder_vocab_size", source_size)
        shared = config.get("share_encoder_decoder_embeddings") is not False
        activation = config.get("activation_function") or switches.activation
        scales = config.get("scale_embedding")

        def token(name: str, default: int | None) -> int | None:
            value = default if config.get(name) is None else config[name]
            if value is not None and (type(value) is not int or not 0 <= value < size):
                raise CheckpointError(
                    f"config.json has {name} {value!a:.40}: need one of the {size} tokens"
                )
            return value

        pad, end = token("pad_token_id", switches.pad), token("eos_token_id", switches.end)
        first = token("decoder_start_token_id", switches.start)
        forced = token("forced_bos_token_id", None)
        words = config.get("bad_words_ids")
        words = words if isinstance(words, list) else ()
        alone = (word[0] for word in words if isinstance(word, list) and len(word) == 1)
        translates = kind in ("mbart", "m2m_100")
        made = cls(
            switches,
            vocab_size=size,
            source_size=source_size,
            shared=shared,
            d_model=whole_number(config, "d_model"),
            # num_hidden_layers, where it stands, is the encoder's number.
            encoder=_stack(config, "encoder"),
            decoder=_stack(config, "decoder"),
            activation=activation,
            max_length=whole_number(config, "max_position_embeddings", 1024),
            scales=switches.scales if scales is None else bool(scales),
            pad=-1 if pad is None else pad,
            end=switches.end if end is None else end,
            start=tuple(id for id in (end if first is None else first, forced) if id is not None),
            needs_language=translates and forced is None and first in (None, end),
            in_place=translates and first != end,
            banned=tuple(id for id in alone if type(id) is int and 0 <= id < size),
        )
        wrong = {
            f"activation_function {activation!a:.40}": activation not in ACTIVATIONS,
            f"one table for {source_size} and {size} tokens": shared and size != source_size,
            "no pad_token_id": pad is None,
        }
        for part in (made.encoder, made.decoder):
            wrong[f"{part.heads} heads over {made.d_model} columns"] = made.d_model % part.heads > 0
        if found := [what for what, is_wrong in wrong.items() if is_wrong]:
            raise CheckpointError(f"config.json has {found[0]}, which is not read here")
        return made

    @property
    def rows(self) -> int:
        """The rows of the table of positions."""
        before = {"learned": OFFSET, "marian": 0, "m2m": self.pad + 1}
        return self.max_length + before[self.switches.positions]


def _stack(config: Mapping[str, Any], stack: str) -> StackShape:
    heads, inner = (whole_number(config, f"{stack}_{n}") for n in ("attention_heads", "ffn_dim"))
    return StackShape(whole_number(config, f"{stack}_layers", most=MOST_LAYERS), heads, inner)
