"""A drafter on hidden states that is known by the shapes of its files: what it would take, and its
drafts timed as a draft model's steps are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..checkpoints.tensors import dtype_name
from ..interfaces import Context, Scores
from ..models.base import Base
from ..models.drafters import module_of
from ..models.drafters.files import SpeculatorFiles
from ..models.drafters.layers import Layer
from ..models.drafters.network import Reading, Speculator
from ..models.number_format import NumberFormat
from ..models.outline import Outline, fill
from .passes import CHAIN, Clock, PassTimer


@dataclass(frozen=True)
class AskedDrafter:
    """One drafter as it was asked for. files: from `speculators.outline`. name: for messages."""

    name: str
    files: SpeculatorFiles
    dtype: str = "auto"
    q_bits: int | None = None

    def outline(self, target: Outline) -> DrafterOutline:
        """Its outline on a target. Raises CheckpointError where it was made for another one."""
        return DrafterOutline(self, target)


class Lender:
    """A target of which a few layers may be all that is here: what it lends a drafter does not
    depend on the others. model: the target as soon as there is one; no values until then."""

    def __init__(self, target: Outline, files: SpeculatorFiles) -> None:
        self.layers = len(target.layers)
        self.vocabulary = target.vocabulary
        self.width = files.target_width
        self.network = target.network
        self.model: Base | None = None

    @property
    def state_dtype(self) -> mx.Dtype:
        """Of the hidden states."""
        return mx.float32 if self.model is None else self.model.state_dtype

    def embed(self, tokens: mx.array) -> mx.array:
        """As contracts.TargetModel says."""
        if self.model is None:
            return mx.zeros((*tokens.shape, self.width))
        return self.model.embed(tokens)

    def head(self, states: mx.array) -> mx.array:
        """As contracts.TargetModel says."""
        assert self.model is not None, "drafts are timed once there is a target"
        return self.model.head(states)


class DrafterOutline:
    """What models.outline.Outline tells of a model."""

    def __init__(self, asked: AskedDrafter, target: Outline) -> None:
        files = asked.files
        self.kind = files.kind
        self.vocabulary = files.vocabulary
        self._encodes = target.kind == "encoder-decoder"
        self._lender = Lender(target, files)
        files.check(None, self._lender.layers, self.vocabulary)
        self._network: Speculator = module_of(files.kind).network(files, self._lender)
        self._network.take(files, NumberFormat(asked.dtype, asked.q_bits), values=False)
        self.nbytes = self._network.nbytes
        bits = {module.bits for module in self._network.modules() if hasattr(module, "bits")}
        self.dtype = "".join(f"{each}-bit, " for each in bits) + dtype_name(self._network.dtype)

    @property
    def layers(self) -> Sequence[Layer]:
        """All that it has."""
        return self._network.layers

    @property
    def most(self) -> int:
        """How many tokens a round may draft."""
        most: int = self._network.most
        return most

    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """Keys and values of a text, and of its source where the target encodes that."""
        columns = generated if self._encodes else prompt + generated
        return self._network.cache_nbytes(prompt, columns)

    def timer(self, model: Base, prompt: int, clock: Clock) -> PassTimer:
        """Of drafts behind a prompt of so many tokens, with random weights. model: the target, or a
        part of it that has the same embedding and head."""
        self._lender.model = model
        fill(self._network, 0, {})
        reading = self._read(prompt, 1)
        reading.evaluate()
        return DraftTimer(Drafts(reading, self._hidden(1)), self.most, clock)

    def _read(self, prompt: int, generated: int) -> Reading:
        """A sequence of such lengths; computed when it is asked for."""
        reading = self._network.open()
        rows = generated if self._encodes else prompt + generated
        if self._encodes:
            reading.attend(self._random((1, prompt, self._lender.width)))
        reading.read(self._hidden(rows), mx.zeros((1, rows), dtype=mx.int32))
        return reading

    def _hidden(self, rows: int) -> mx.array:
        width = sum(map(self._network.width_of, self._network.taps))
        return self._random((1, rows, width))

    def _random(self, shape: tuple[int, ...]) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(1)).astype(self._network.dtype)


class Drafts:
    """contracts.Context as far as a PassTimer asks: each pass drafts a token, and the first one of
    a round reads a row of the target's before.

    reading: that a network has opened. count: of the round's tokens. hidden: (1, 1, taps x target's
    width), that row.
    """

    replays = False

    def __init__(self, reading: Any, hidden: mx.array) -> None:
        self.count = 1
        self._reading = reading
        self._hidden = hidden
        self._length: int | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows read."""
        return (self._reading.length,)

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """Draft behind `tokens`, (1, 1)."""
        if self._length is not None:
            return Scores(self._reading.guess_after(tokens))
        self._reading.read(self._hidden, tokens)
        self._length = self._reading.length
        return Scores(self._reading.guess(self.count))

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """The round is over: what was read stays, as it does in decoding."""
        if self._length is not None:
            self._reading.forget(self._length)
        self._length = None


class DraftTimer(PassTimer):
    """most: tokens of the longest draft."""

    def __init__(self, drafts: Drafts, most: int, clock: Clock) -> None:
        context: Context = drafts  # type: ignore[assignment]
        super().__init__(context, draft=context, chain=min(CHAIN, most), clock=clock)
        self._drafts = drafts

    def _round(self, drafted: int, size: int) -> None:
        self._drafts.count = drafted
        super()._round(drafted, size)
