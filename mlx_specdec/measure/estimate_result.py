"""What an estimate says, frozen, and the predictions in it. Numbers and names only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..draft_length.speedup import RoundCost, speedups
from ..options import SELF

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance probabilities, which nobody knows before."""
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


def chances(alpha: float, count: int) -> list[float]:
    """a_1 .. a_count where each token is accepted with probability alpha."""
    return [alpha**place for place in range(1, count + 1)]


def best(cost: RoundCost, alpha: float, longest: int) -> Prediction:
    """The length up to `longest` with the highest speedup, 0 where no length gains."""
    gains = speedups(cost, chances(alpha, longest))
    chosen = max(range(len(gains)), key=gains.__getitem__)
    return Prediction(alpha, chosen, gains[chosen])


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
class ClusterPrediction(Prediction):
    """As a Prediction, over plain decoding on the cluster. break_even_us: how long an exchange
    takes from which on speculation gains more than on one machine, None where it never does.
    pays_below_us: and below which the cluster is faster than one machine, both with such rounds."""

    break_even_us: float | None
    pays_below_us: float


@dataclass(frozen=True)
class ClusterSpeeds:
    """What follows from the times of one machine. pays_below_us: how long an exchange takes below
    which the cluster decodes plainly faster than one machine."""

    step_seconds: float
    pays_below_us: float
    predictions: tuple[ClusterPrediction, ...]


@dataclass(frozen=True)
class Cluster:
    """Machines that share the target; the draft is on each of them.

    link_us: what an exchange takes. exchanges: of a plain step, and of a round. share: of a pass,
    that a machine takes without the network. target_bytes: weights and caches that a machine holds.
    """

    machines: int
    mode: str
    link_us: float
    exchanges: int
    share: float
    target_bytes: int
    speeds: ClusterSpeeds | None


@dataclass(frozen=True)
class Estimate:
    """Everything. proposer: the kind of drafter. speeds: None where the pair does not fit, so that
    nothing was measured, and where the time did not suffice (late). cluster: None where one machine
    has all of the target. read_tokens: of the prompt that passes were measured behind."""

    proposer: str
    target: Side
    draft: Side
    prompt_tokens: int
    max_tokens: int
    memory_limit_bytes: int
    speeds: Speeds | None
    cluster: Cluster | None = None
    late: bool = False
    read_tokens: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Weights and caches that a machine holds."""
        of_target = self.cluster.target_bytes if self.cluster else self.target.bytes
        return of_target + self.draft.bytes

    @property
    def fits(self) -> bool:
        """Whether a machine has room for them."""
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
        if self.speeds:
            notes.extend(self._notes_on_speeds(self.speeds))
        elif self.late:
            notes.append(
                "the time did not suffice to measure steps and short passes of both models: give "
                "more --seconds"
            )
        elif self.fits:
            notes.append("one machine has to hold a target of so few layers to measure it")
        return tuple(notes)

    def _notes_on_speeds(self, speeds: Speeds) -> Iterator[str]:
        for role, side in (("target", self.target), ("draft", self.draft)):
            if side.measured_layers is not None:
                few, more = side.measured_layers
                yield (
                    f"the {role}'s times are extrapolated from {few} and {more} of its "
                    f"{side.layers} layers"
                )
        if self.read_tokens is not None and self.read_tokens < self.prompt_tokens:
            yield (
                f"passes were measured behind {self.read_tokens} of the prompt's "
                f"{self.prompt_tokens} tokens: there was no time to read more"
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
        if self.cluster is not None:
            yield (
                f"what {self.cluster.machines} machines take is computed from the times of this "
                "one: machines that are alike, and a link as fast for several tokens as for one"
            )
        yield (
            "weights are random, so the acceptance probability per token is yours to guess: how "
            "likely the target keeps a drafted token whose predecessors it has kept"
        )

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        told = asdict(self)
        del told["late"], told["read_tokens"]
        if self.cluster is None:
            del told["cluster"]
        return {
            **told,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "notes": list(self.notes),
        }
