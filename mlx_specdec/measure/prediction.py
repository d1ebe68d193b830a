"""The result of an estimate: what a pair needs and gains, on one machine and on several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import OptionError
from ..models.outline import Outline
from ..options import SELF
from .speedup import RoundCost, break_even, pays_below, shared, speedups

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance probabilities that are predicted for; the real one is unknown before."""
BUSY = 0.1
"""Relative spread of samples above which a reader is warned."""
LONGEST_DRAFT = 16
SUMS = {"encoder-decoder": 3, "decoder-only": 2}
"""Sums over all machines in each layer of the decoder."""
AGREEMENTS = 1
"""Exchanges a round that carry the decisions of the first machine to the others."""


@dataclass(frozen=True)
class Prediction:
    """The best number of drafted tokens, 0 for plain decoding, where each of them is accepted with
    probability alpha."""

    alpha: float
    num_draft: int
    speed_up: float


def chances(alpha: float, count: int) -> list[float]:
    """Return a_1 .. a_count where each token is accepted with probability alpha."""
    return [alpha**place for place in range(1, count + 1)]


def best(cost: RoundCost, alpha: float, longest: int) -> Prediction:
    """Return the length up to `longest` with the highest speedup, 0 where no length gains."""
    gains = speedups(cost, chances(alpha, longest))
    chosen = max(range(len(gains)), key=gains.__getitem__)
    return Prediction(alpha, chosen, gains[chosen])


@dataclass(frozen=True)
class Side:
    """One model. layers: of the decoder. measured_layers: two depths that were measured, None for
    the whole model."""

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
    """What was measured, and what follows from it; see PassCosts. step_seconds, draft_seconds: a
    plain step of the target, a draft step. draft_cost: draft_seconds in plain steps (c). passes:
    entry m - 1 is a pass over m tokens in plain steps, V(m). start: in plain steps."""

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
class Link:
    """What connects machines. seconds: time of an exchange, whatever it carries. pipeline: each
    machine has some of the layers, and not a part of all."""

    machines: int
    seconds: float
    pipeline: bool = False


@dataclass(frozen=True)
class ClusterPrediction(Prediction):
    """A prediction over plain decoding on the cluster. break_even_us: time of an exchange above
    which speculation gains more than on one machine. pays_below_us: below which the cluster is
    faster than one machine, both with such rounds."""

    break_even_us: float | None
    pays_below_us: float


@dataclass(frozen=True)
class ClusterSpeeds:
    """What follows from the times of one machine. pays_below_us: time of an exchange below which
    plain decoding is faster on the cluster than on one machine."""

    step_seconds: float
    pays_below_us: float
    predictions: tuple[ClusterPrediction, ...]


@dataclass(frozen=True)
class Cluster:
    """Machines that share the target; the draft is on each of them. exchanges: of a plain step, and
    of a round. share: of a pass on one machine that each takes without the network. target_bytes:
    weights and caches on each."""

    machines: int
    mode: str
    link_us: float
    exchanges: int
    share: float
    target_bytes: int
    speeds: ClusterSpeeds | None


def cluster(link: Link, target: Outline, caches_bytes: int) -> Cluster:
    """Return what each machine holds of a target, and its share of a pass. Raises OptionError for a
    family that has no pipeline."""
    if link.pipeline and target.kind == "encoder-decoder":
        raise OptionError("a T5 model cannot be a pipeline: leave out --pipeline")
    machines, layers = link.machines, sum(target.layer_nbytes)
    # Embedding and head are on every machine, and a step reads the head.
    tables = target.token_nbytes
    divided = layers / (layers + max(tables, default=0))
    weights = sum(tables) + (target.nbytes - sum(tables)) / machines
    # A pipeline hands its states on from machine to machine, and what comes out to all of them.
    passes = machines + 1 if link.pipeline else SUMS[target.kind] * len(target.layers)
    return Cluster(
        machines=machines,
        mode="pipeline" if link.pipeline else "tensor",
        link_us=1e6 * link.seconds,
        exchanges=passes + AGREEMENTS,
        share=1.0 if link.pipeline else divided / machines + 1 - divided,
        target_bytes=round(weights + caches_bytes / machines),
        speeds=None,
    )


def with_speeds(
    known: Cluster, cost: RoundCost, step_seconds: float, alone: Sequence[Prediction]
) -> Cluster:
    """Add what follows from costs, plain steps and predictions on one machine."""
    exchanges = 1e-6 * known.link_us * known.exchanges
    network, longest = exchanges / step_seconds, max(cost.passes) - 1
    cost_there = shared(cost, known.share, network)

    def link_us(network: float) -> float:
        return 1e6 * network * step_seconds / known.exchanges

    predictions = []
    for one in alone:
        chosen = best(cost_there, one.alpha, longest)
        even = None
        if length := one.num_draft or chosen.num_draft:
            even = break_even(cost, known.share, chances(one.alpha, length))
        below = pays_below(cost, known.share, chances(one.alpha, chosen.num_draft))
        predictions.append(
            ClusterPrediction(
                **vars(chosen),
                break_even_us=None if even is None else link_us(even),
                pays_below_us=link_us(below),
            )
        )
    speeds = ClusterSpeeds(
        step_seconds=known.share * step_seconds + exchanges,
        pays_below_us=link_us(pays_below(cost, known.share, ())),
        predictions=tuple(predictions),
    )
    return replace(known, speeds=speeds)


@dataclass(frozen=True)
class Estimate:
    """The whole result. proposer: the kind of drafter. speeds: None where the pair does not fit, so
    that nothing was measured, and where the time did not suffice (late). cluster: None where one
    machine has all of the target. read_tokens: of the prompt that passes were measured behind."""

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
        """Weights and caches on each machine."""
        of_target = self.cluster.target_bytes if self.cluster else self.target.bytes
        return of_target + self.draft.bytes

    @property
    def fits(self) -> bool:
        """Whether a machine has room for these."""
        return self.memory_bytes <= self.memory_limit_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how far these figures can be trusted."""
        return tuple(self._notes())

    def _notes(self) -> Iterator[str]:
        speeds = self.speeds
        if self.target.vocabulary != self.draft.vocabulary:
            yield (
                f"the models have {self.target.vocabulary} and {self.draft.vocabulary} logits: "
                "whether the tokens are the same only their tokenizers tell"
            )
        if self.draft.name == SELF:
            yield (
                "the draft shares an encoder and what is only looked up with the target, so that "
                "it takes less memory than is said here"
            )
        if speeds is None:
            if self.late:
                yield "there was no time for steps and short passes of both: give more --seconds"
            elif self.fits:
                yield "one machine has to hold a target of so few layers to measure it"
            return
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
        """Return the payload of `--json`."""
        payload = asdict(self)
        del payload["late"], payload["read_tokens"]
        if self.cluster is None:
            del payload["cluster"]
        derived = {"memory_bytes": self.memory_bytes, "fits": self.fits, "notes": list(self.notes)}
        return {**payload, **derived}
