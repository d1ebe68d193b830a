"""Predicts the memory that a pair takes and its speedup, on one machine and on several.

S(gamma) is the speedup over plain decoding of rounds with gamma draft tokens:

    S(gamma) = (1 + a_1 + .. + a_gamma) / (gamma c + V(gamma + 1) + o)

All costs are in plain steps of the target. The formula is from Leviathan et al. (arXiv 2211.17192,
section 3), with a measured V in the place of 1. a_i is the probability that the first i draft
tokens are all accepted. It is alpha ** i if every token has the acceptance probability alpha."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import OptionError
from ..models.outline import Outline
from ..options import own_layers

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance probabilities to predict speedups for. The pair's own one is unknown."""
BUSY = 0.1
"""Relative spread of the samples above which a note says that the machine was busy."""
LONGEST_DRAFT = 16
"""Draft length up to which a complete measurement predicts, in tokens."""
SUMS = {"encoder-decoder": 3, "decoder-only": 2}
"""Number of all-reduce exchanges in each decoder layer of a tensor-parallel target, by its kind."""
AGREEMENTS = 1
"""Exchanges per round in which the first machine sends its decisions to the others."""


@dataclass(frozen=True)
class RoundCost:
    """The costs of the parts of a round, in plain steps of the target.

    Attributes:
        draft: The cost of one draft step (c).
        passes: The cost of a pass of the target, by the number of its tokens (V).
        start: The cost of a round that belongs to neither model (o).
    """

    draft: float
    passes: Mapping[int, float]
    start: float = 0.0

    def pass_over(self, tokens: int) -> float:
        """Return V, interpolated linearly between the measured numbers of tokens."""
        sizes = sorted(self.passes)
        return float(np.interp(tokens, sizes, [self.passes[size] for size in sizes]))

    def of(self, acceptance: Sequence[float]) -> float:
        """Return the expected cost of a round with one draft token for each a_i. It is 1, the cost
        of a plain step, without draft tokens."""
        gamma = len(acceptance)
        if not gamma:
            return 1.0
        return gamma * self.draft + self.pass_over(gamma + 1) + self.start


def speedups(
    cost: RoundCost, acceptance: Sequence[float], lengths: Sequence[int] = ()
) -> tuple[float, ...]:
    """Return S(gamma) for gamma = 0 .. len(acceptance). The first entry is 1. `lengths` are the
    numbers of tokens of the sequences, whose last rounds are cut short. Without them, the sequences
    are taken to be endless."""
    tokens = list(accumulate(acceptance, initial=1.0))
    if lengths:
        for gamma in range(1, len(tokens)):
            rounds = expected_rounds(acceptance[:gamma], max(lengths))
            tokens[gamma] = sum(lengths) / sum(rounds[length] for length in lengths)
    return tuple(
        count / max(cost.of(acceptance[:gamma]), 1e-12) for gamma, count in enumerate(tokens)
    )


def expected_rounds(acceptance: Sequence[float], longest: int) -> list[float]:
    """Return the expected number of rounds of a sequence of n tokens, for n = 0 .. longest. A round
    emits k + 1 tokens with probability a_k - a_(k + 1); a_0 is 1."""
    shares = [1.0, *acceptance, 0.0]
    emits = [shares[count] - shares[count + 1] for count in range(len(acceptance) + 1)]
    rounds = [0.0]
    for length in range(1, longest + 1):
        after = (chance * rounds[max(0, length - k - 1)] for k, chance in enumerate(emits))
        rounds.append(1.0 + sum(after))
    return rounds


def shared(cost: RoundCost, share: float, network: float) -> RoundCost:
    """Return the costs of a round on a cluster, in plain steps of the cluster, from the costs on
    one machine. A pass takes `share` of its time there, and `network` plain steps more."""
    step = share + network
    passes = {m: (share * alone + network) / step for m, alone in cost.passes.items()}
    return RoundCost(cost.draft / step, passes, cost.start / step)


def break_even(cost: RoundCost, share: float, acceptance: Sequence[float]) -> float | None:
    """Return the network time of a pass above which speculation gains more on the cluster than on
    one machine, in plain steps of one machine; None if it never does."""
    alone = cost.of(acceptance)
    local, passes = _round(cost, share, acceptance)
    return None if alone <= passes else max(0.0, (local - share * alone) / (alone - passes))


def pays_below(cost: RoundCost, share: float, acceptance: Sequence[float]) -> float:
    """Return the network time of a pass below which a round is faster on the cluster than on one
    machine, in plain steps of one machine. Without any a_i, the round is a plain step."""
    local, passes = _round(cost, share, acceptance)
    return max(0.0, (cost.of(acceptance) - local) / passes)


def _round(cost: RoundCost, share: float, acceptance: Sequence[float]) -> tuple[float, float]:
    """Return the time of a round on the cluster without the network, and its number of passes."""
    local, slow = (
        (share + network) * shared(cost, share, network).of(acceptance) for network in (0.0, 1.0)
    )
    return local, slow - local


@dataclass(frozen=True)
class BestLength:
    """The draft length with the highest speedup, or 0, if every token is accepted with probability
    alpha."""

    alpha: float
    num_draft: int
    speed_up: float


def chances(alpha: float, count: int) -> list[float]:
    """Return a_1 .. a_count if every token is accepted with probability alpha."""
    return [alpha**place for place in range(1, count + 1)]


def best(cost: RoundCost, alpha: float, longest: int) -> BestLength:
    """Return the draft length up to `longest` with the highest speedup, or 0 if none has one."""
    gains = speedups(cost, chances(alpha, longest))
    return BestLength(alpha, int(np.argmax(gains)), max(gains))


@dataclass(frozen=True)
class Side:
    """The size of one of the two models. `vocabulary` is the number of logits. `measured_layers`
    are the two depths of the decoder at which the model is timed; None for all of its layers."""

    name: str
    dtype: str
    vocabulary: int
    weights_bytes: int
    caches_bytes: int
    layers: int
    measured_layers: tuple[int, int] | None

    @property
    def bytes(self) -> int:
        return self.weights_bytes + self.caches_bytes


@dataclass(frozen=True)
class Speeds:
    """The measured times of a pair, and the predictions that follow from them. Costs are in plain
    steps, as in `RoundCost`; entry m - 1 of `passes` is V(m). `PassCosts` explains the
    other fields."""

    step_seconds: float
    draft_seconds: float
    draft_cost: float
    passes: tuple[float, ...]
    start: float
    samples: int
    spread: float
    predictions: tuple[BestLength, ...]


@dataclass(frozen=True)
class Link:
    """The network between machines that share a target. An exchange takes `seconds`, whatever its
    size. In a pipeline, each machine holds some of the layers, instead of a part of every layer."""

    machines: int
    seconds: float
    pipeline: bool = False


@dataclass(frozen=True)
class ClusterLength(BestLength):
    """A speedup over plain decoding on the cluster. If an exchange takes more than `break_even_us`
    microseconds, speculation gains more on the cluster than on one machine; with None it never
    does. If it takes less than `pays_below_us`, rounds of this length are faster on the cluster."""

    break_even_us: float | None
    pays_below_us: float


@dataclass(frozen=True)
class ClusterSpeeds:
    """The times of a cluster, predicted from the times of one machine. If an exchange takes less
    than `pays_below_us` microseconds, plain decoding is faster on the cluster than on one
    machine."""

    step_seconds: float
    pays_below_us: float
    predictions: tuple[ClusterLength, ...]


@dataclass(frozen=True)
class Cluster:
    """A cluster: several machines share the target, and each of them holds the whole draft.

    Attributes:
        mode: "pipeline" or "tensor".
        link_us: The time of one exchange, in microseconds.
        exchanges: The number of exchanges in a plain step, and in a round.
        share: The time of a pass without the network, relative to a pass on one machine.
        target_bytes: The bytes of the target's weights and caches on each machine.
        speeds: The predicted times; None before the models are timed.
    """

    machines: int
    mode: str
    link_us: float
    exchanges: int
    share: float
    target_bytes: int
    speeds: ClusterSpeeds | None


def cluster(link: Link, target: Outline, caches_bytes: int) -> Cluster:
    """Return the machines that share a target, without speeds. Raises OptionError if the link is a
    pipeline and the target has an encoder."""
    if link.pipeline and target.kind == "encoder-decoder":
        raise OptionError("an encoder-decoder model cannot be a pipeline: leave out --pipeline")
    machines, layers = link.machines, sum(target.layer_nbytes)
    # Every machine holds the embedding and the head, and each step reads the head's weights.
    tables = target.token_nbytes
    divided = layers / (layers + max(tables, default=0))
    weights = sum(tables) + (target.nbytes - sum(tables)) / machines
    # In a pipeline, each machine passes its hidden states to the next one, and the last machine
    # sends the result to all of them.
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
    machines: Cluster, cost: RoundCost, step_seconds: float, alone: Sequence[BestLength]
) -> Cluster:
    """Return the machines with their predicted times. All other arguments are for one machine."""
    exchanges = 1e-6 * machines.link_us * machines.exchanges
    cluster_cost = shared(cost, machines.share, exchanges / step_seconds)

    def link_us(network: float) -> float:
        return 1e6 * network * step_seconds / machines.exchanges

    predictions = []
    for local in alone:
        chosen, even = best(cluster_cost, local.alpha, max(cost.passes) - 1), None
        if length := local.num_draft or chosen.num_draft:
            even = break_even(cost, machines.share, chances(local.alpha, length))
        below = pays_below(cost, machines.share, chances(local.alpha, chosen.num_draft))
        even_us = None if even is None else link_us(even)
        predictions.append(
            ClusterLength(**vars(chosen), break_even_us=even_us, pays_below_us=link_us(below))
        )
    speeds = ClusterSpeeds(
        step_seconds=machines.share * step_seconds + exchanges,
        pays_below_us=link_us(pays_below(cost, machines.share, ())),
        predictions=tuple(predictions),
    )
    return replace(machines, speeds=speeds)


@dataclass(frozen=True)
class Estimate:
    """The memory and the predicted speed of a pair.

    Attributes:
        prompt_tokens, max_tokens: The lengths of prompt and output that the caches hold.
        memory_limit_bytes: The memory that the machine has for a process.
        speeds: The measured times; None if the pair does not fit, or if `late`.
        late: Whether the time did not suffice to measure.
        read_tokens: The length of the prompt after which passes were timed.
    """

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
        """The bytes of weights and caches on each machine."""
        of_target = self.cluster.target_bytes if self.cluster else self.target.bytes
        return of_target + self.draft.bytes

    @property
    def fits(self) -> bool:
        """Whether a machine has enough memory for the weights and caches."""
        return self.memory_bytes <= self.memory_limit_bytes

    @property
    def notes(self) -> Iterator[str]:
        """Sentences for the user on how far the figures can be trusted."""
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
