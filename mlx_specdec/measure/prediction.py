"""What a pair needs and gains, on one machine and on several.

S(gamma) is how many times as fast as plain decoding rounds of gamma drafted tokens are: (1 + a_1 +
.. + a_gamma) / (gamma c + V(gamma + 1) + o + r), all costs in plain steps of the target (Leviathan
et al., arXiv 2211.17192, section 3, with a measured V in the place of 1). a_i is the probability
that the first i drafted tokens are all accepted: alpha ** i where each token has the acceptance
probability alpha."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from ..errors import OptionError
from ..models.outline import Outline
from ..options import own_layers

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
class RoundCost:
    """What the parts of a round cost, in plain steps. draft: one draft step (c). passes: a pass of
    the target by the number of its tokens (V). start: what every round waits for besides (o).
    replays: what is rejected costs a pass over the tokens that are kept (r)."""

    draft: float
    passes: Mapping[int, float]
    start: float = 0.0
    replays: bool = False

    def of(self, acceptance: Sequence[float]) -> float:
        """A round that drafts one token for each a_i; 1 where there are none, a plain step."""
        gamma = len(acceptance)
        if not gamma:
            return 1.0
        cost = gamma * self.draft + between(self.passes, gamma + 1) + self.start
        if self.replays and acceptance[-1] < 1:
            rejected = 1 - acceptance[-1]
            # Accepted tokens of the rounds in which not all were: sum of i (a_i - a_(i + 1)).
            kept = (sum(acceptance) - gamma * acceptance[-1]) / rejected
            cost += rejected * between(self.passes, round(kept) + 1)
        return cost


def emitted(acceptance: Sequence[float]) -> list[float]:
    """Expected tokens of a round for gamma = 0, 1, .., the target's own token included."""
    return list(accumulate(acceptance, initial=1.0))


def speedups(
    cost: RoundCost, acceptance: Sequence[float], lengths: Sequence[int] = ()
) -> tuple[float, ...]:
    """S(gamma) for gamma = 0 .. len(acceptance), the first being 1. lengths: tokens of the
    sequences, which cut their last rounds short; without them there is no end."""
    tokens = emitted(acceptance)
    if lengths:
        for gamma in range(1, len(tokens)):
            rounds = expected_rounds(acceptance[:gamma], max(lengths))
            tokens[gamma] = sum(lengths) / sum(rounds[length] for length in lengths)
    return tuple(
        each / max(cost.of(acceptance[:gamma]), 1e-12) for gamma, each in enumerate(tokens)
    )


def expected_rounds(acceptance: Sequence[float], longest: int) -> list[float]:
    """Entry n: how many rounds a sequence of n tokens takes, for n = 0 .. longest. A round emits k
    + 1 tokens with probability a_k - a_(k + 1), a_0 being 1."""
    shares = [1.0, *acceptance, 0.0]
    chances = [shares[kept] - shares[kept + 1] for kept in range(len(acceptance) + 1)]
    rounds = [0.0]
    for length in range(1, longest + 1):
        after = (chance * rounds[max(0, length - kept - 1)] for kept, chance in enumerate(chances))
        rounds.append(1.0 + sum(after))
    return rounds


def between(points: Mapping[int, float], place: int) -> float:
    """The value at `place` on the straight lines through the points; the last line goes on."""
    if place in points or len(points) == 1:
        return points.get(place, next(iter(points.values())))
    known = sorted(points)
    at = min(max(1, bisect_left(known, place)), len(known) - 1)
    below, above = known[at - 1], known[at]
    share = (place - below) / (above - below)
    return points[below] + share * (points[above] - points[below])


def shared(cost: RoundCost, share: float, network: float) -> RoundCost:
    """What rounds cost the cluster, in its own plain steps, from what they cost one machine."""
    step = share + network
    return RoundCost(
        draft=cost.draft / step,
        passes={m: (share * alone + network) / step for m, alone in cost.passes.items()},
        start=cost.start / step,
        replays=cost.replays,
    )


def break_even(cost: RoundCost, share: float, acceptance: Sequence[float]) -> float | None:
    """The network above which a round of these a_i speeds the cluster up by more than it does one
    machine; None where there is no such network."""
    alone = cost.of(acceptance)
    local, passes = _round(cost, share, acceptance)
    if alone <= passes:
        return None
    return max(0.0, (local - share * alone) / (alone - passes))


def pays_below(cost: RoundCost, share: float, acceptance: Sequence[float]) -> float:
    """The network below which a round of these a_i takes the cluster less time than one machine; of
    a plain step without any."""
    local, passes = _round(cost, share, acceptance)
    return max(0.0, (cost.of(acceptance) - local) / passes)


def _round(cost: RoundCost, share: float, acceptance: Sequence[float]) -> tuple[float, float]:
    """What a round takes besides the network, and how often it pays the network."""
    local, slow = (
        (share + network) * shared(cost, share, network).of(acceptance) for network in (0.0, 1.0)
    )
    return local, slow - local


@dataclass(frozen=True)
class Prediction:
    """The best number of drafted tokens, 0 for none, if each is accepted with probability alpha."""

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
    """One model. layers: of the decoder. measured_layers: two depths; None for the whole model."""

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
        raise OptionError("an encoder-decoder model cannot be a pipeline: leave out --pipeline")
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
        if own_layers(self.draft.name) is not None:
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
            "weights are random, so only the speedup at each acceptance probability is known: "
            "drafts of one family mostly reach 60 to 80 %, and mlx-specdec bench measures it with "
            "the real weights"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the payload of `--json`."""
        payload = asdict(self)
        del payload["late"], payload["read_tokens"]
        if self.cluster is None:
            del payload["cluster"]
        derived = {"memory_bytes": self.memory_bytes, "fits": self.fits, "notes": list(self.notes)}
        return {**payload, **derived}
