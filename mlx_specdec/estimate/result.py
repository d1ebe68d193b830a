"""What an estimate says, frozen. Numbers and names only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..options import SELF

BUSY = 0.1
"""Relative spread of samples above which a reader is warned."""
LONGEST_DRAFT = 16


@dataclass(frozen=True)
class Prediction:
    """The best number of drafted tokens, 0 being plain decoding, where each of them has the
    acceptance probability alpha."""

    alpha: float
    num_draft: int
    speed_up: float


@dataclass(frozen=True)
class Side:
    """One model. layers: that decode. measured_layers: two depths, or None where all were."""

    name: str
    dtype: str
    vocabulary: int
    weights_bytes: int
    caches_bytes: int
    layers: int
    measured_layers: tuple[int, int] | None

    @property
    def bytes(self) -> int:
        """Weights and caches."""
        return self.weights_bytes + self.caches_bytes


@dataclass(frozen=True)
class Speeds:
    """What was measured, and what follows from it.

    step_seconds, draft_seconds: a plain step of the target, a draft step. draft_cost: the one in
    the other (c). passes: entry m - 1 is a pass over m tokens in plain steps, V(m), as far as there
    was time to measure. start: what the first pass of a round takes longer, in plain steps.
    replays: what is rejected costs another pass. samples: behind each figure, at least. spread: by
    how much a typical sample was off, relatively.
    """

    step_seconds: float
    draft_seconds: float
    draft_cost: float
    passes: tuple[float, ...]
    start: float
    replays: bool
    samples: int
    spread: float
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class Estimate:
    """Everything. proposer: the kind of drafter. speeds: None where the pair does not fit, so that
    nothing was measured."""

    proposer: str
    target: Side
    draft: Side
    prompt_tokens: int
    max_tokens: int
    memory_limit_bytes: int
    speeds: Speeds | None

    @property
    def memory_bytes(self) -> int:
        """Weights and caches of both models."""
        return self.target.bytes + self.draft.bytes

    @property
    def fits(self) -> bool:
        """Whether both models can work at once."""
        return self.memory_bytes <= self.memory_limit_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of these figures, in sentences."""
        notes = []
        if self.target.vocabulary != self.draft.vocabulary:
            notes.append(
                f"the models have {self.target.vocabulary} and {self.draft.vocabulary} logits: "
                "whether the tokens are the same only their tokenizers tell"
            )
        if self.draft.name == SELF:
            notes.append(
                "the draft shares an encoder and what is only looked up with the target, so that "
                "it takes less memory than is said here"
            )
        return (*notes, *self._notes_on_speeds(self.speeds)) if self.speeds else tuple(notes)

    def _notes_on_speeds(self, speeds: Speeds) -> Iterator[str]:
        for role, side in (("target", self.target), ("draft", self.draft)):
            if side.measured_layers is not None:
                few, more = side.measured_layers
                yield (
                    f"the {role}'s times are extrapolated from {few} and {more} of its "
                    f"{side.layers} layers"
                )
        if speeds.samples == 1:
            yield (
                "some figures were measured once and are not reliable: give more --seconds, or "
                "more --turns"
            )
        if len(speeds.passes) <= LONGEST_DRAFT:
            yield (
                f"the time sufficed for drafts of up to {len(speeds.passes) - 1} tokens; give "
                "more --seconds to learn about longer ones"
            )
        if speeds.spread > BUSY:
            yield (
                f"times varied by {speeds.spread:.0%} from turn to turn, so the machine was "
                "busy with something else: measure again when it is not"
            )
        yield (
            "weights are random, so the acceptance probability per token is yours to guess: how "
            "likely the target keeps a drafted token whose predecessors it has kept"
        )

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            **asdict(self),
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "notes": list(self.notes),
        }
