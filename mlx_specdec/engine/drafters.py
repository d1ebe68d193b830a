"""What earlier texts have taught of a pair and its drafters, read and kept."""

from __future__ import annotations

import functools
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from importlib.metadata import version

import mlx.core as mx

from .. import process as blas
from ..draft_length import saved
from ..draft_length.auto_length import AutoLength, Source
from ..draft_length.length import DraftLength, FixedLength
from ..errors import OptionError
from ..interfaces import FINAL, Proposer
from ..interfaces.rounds import RoundReport
from ..options import Options
from ..proposers import DRAFTERS, find, given, missing
from ..proposers.combined import FirstOf, RowByRow
from ..proposers.drafter import Drafter, Setup
from .pair import Pair

TEMPERATURES = (0.0, 0.4, 0.8, 1.2)
"""Ends of the ranges in which texts are taken to be accepted alike."""
_version = functools.cache(version)
"""Looking it up takes as long as a step of a small model."""


def pair_key(pair: Pair) -> dict[str, str | int]:
    """Return what the costs of rounds depend on, whoever drafts. A target is known by its name and
    the bytes of its weights."""
    return {
        "device": device_name(),
        "mlx": _version("mlx"),
        "blas": blas.name(),
        "target": pair.name,
        "target_bytes": pair.target.nbytes,
        "dtype": pair.dtype,
    }


def source(drafter: Drafter, options: Options) -> Source:
    """Return the drafter as a source of drafts, with the names under which its costs and its
    acceptance are saved. Those that take no time cost alike."""
    name = f"{drafter.identity or drafter.name}, {drafter.nbytes} bytes"
    sampled = ", sampled" if options.temperature > 0 else ""
    warmth = bisect_left(TEMPERATURES, options.temperature)
    return Source(
        drafter.name,
        drafter.most,
        free=not drafter.nbytes,
        stops=drafter.stops,
        costs=(name if drafter.nbytes else "free") + sampled,
        text=f"{name}, {options.rule_name} {options.delta:g}, temperature {warmth}",
    )


def make_draft_length(pair: Pair, chosen: Sequence[Drafter], options: Options) -> DraftLength:
    """Return what chooses the number of draft tokens, with what earlier sequences have taught."""
    if options.num_draft != "auto":
        return FixedLength(options.num_draft)
    if not chosen:
        return FixedLength(0)
    known = saved.read(pair_key(pair)) if options.cost_cache else None
    return AutoLength([source(each, options) for each in chosen], known)


def keep_costs(pair: Pair, options: Options, lengths: DraftLength) -> None:
    """Write down what sequences have taught, if it is to be kept."""
    if options.cost_cache and isinstance(lengths, AutoLength):
        saved.add(pair_key(pair), lengths.knowledge)


def device_name() -> str:
    """Where MLX computes: "cpu", or the accelerator's own name."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))


HOTTEST_TRIAL = 1.0
"""Temperature above which even good drafters are often refused."""
LAYERS_COUNTED = (
    ", or its config.json counts layers otherwise, which mlx-specdec inspect --probe tells"
)


class Trials:
    """Notices drafters that are hardly ever right, as decoding.rounds.RoundListener says.

    Texts of which a good drafter knows no more do not count: hot ones, and those that a constraint
    or a simulation decides.
    """

    def __init__(self, pair: Pair, chosen: Sequence[Drafter], options: Options) -> None:
        self._pair = pair
        telling = options.temperature <= HOTTEST_TRIAL and options.constraint is None
        counts = telling and options.simulated_acceptance is None
        self._tried = {each.name: each for each in chosen if each.nbytes and counts}
        # Rounds name who drafted only where several may.
        self._alone = chosen[0].name if len(chosen) == 1 else ""

    def on_round(self, report: RoundReport) -> None:
        """Counts up to the end of each drafter's trial."""
        for each in report.sequences:
            name = each.source or self._alone
            if each.drafted and name in self._tried:
                self._pair.trials[name].count(each.drafted, each.accepted)

    def tell(self) -> None:
        """Warns of a drafter that has failed, once for the pair."""
        riding = self._pair.drafter_network
        for name, each in self._tried.items():
            counted = riding is not None and riding.kind == name and FINAL not in riding.taps
            layers = LAYERS_COUNTED if counted else ""
            shown = each.identity or f"{name} of {self._pair.name}"
            if caution := self._pair.trials[name].caution(shown, layers):
                warnings.warn(caution, RuntimeWarning, stacklevel=8)


__all__ = [
    "FREE",
    "Trials",
    "device_name",
    "drafters",
    "keep_costs",
    "make_draft_length",
    "make_proposer",
    "pair_key",
    "proposer_kind",
    "source",
]

FREE = "ngram"
"""The drafter that costs nothing: `auto` asks it before the one with weights."""


def drafters(pair: Pair, options: Options) -> tuple[Drafter, ...]:
    """The drafters of a sequence in the order in which they are asked; none decodes plainly.

    None where the target's passes over several rows mean something else. Raises OptionError where
    the pair does not bring what was asked for.
    """
    if options.regular or options.num_draft == 0 or options.proposer == "none":
        return ()
    certain = () if options.constraint is None else (given.drafter(pair),)
    chosen = (*certain, *_asked_for(pair, options))
    return chosen if chosen and pair.target.rows_agree else ()


def _asked_for(pair: Pair, options: Options) -> tuple[Drafter, ...]:
    if options.proposer in DRAFTERS:
        named = find(options.proposer, pair)
        if named is None:
            raise OptionError(missing(options.proposer, pair))
        return (named,)
    own = tuple(each for name in DRAFTERS if (each := find(name, pair)) and each.nbytes)
    if options.num_draft != "auto" or options.simulated_acceptance is not None:
        # Which is best is measured only where lengths are.
        own = own[:1]
    free = find(FREE, pair)
    # Though nobody asked for it, if its length is its own and what it proposes is verified.
    unasked = own and options.num_draft == "auto" and options.simulated_acceptance is None
    return (free, *own) if free is not None and (options.proposer == "auto" or unasked) else own


def proposer_kind(chosen: Sequence[Drafter]) -> str:
    """Who proposes, in a word: a drafter's name, "auto" for several, or "none"."""
    names = [drafter.name for drafter in chosen]
    return "auto" if len(names) > 1 else "".join(names) or "none"


def make_proposer(
    chosen: Sequence[Drafter], options: Options, lengths: DraftLength, *, batch: bool = False
) -> Proposer | None:
    """What proposes for one sequence, or for a batch; None decodes plainly.

    lengths: what chooses the number of draft tokens; of several drafters each has its own.
    """
    learning = lengths if isinstance(lengths, AutoLength) else None
    made: dict[str, Proposer] = {}
    for place, each in enumerate(chosen):
        stops = learning and each.stops and not batch
        setup = Setup(
            options,
            followed=place < len(chosen) - 1,
            # Batches often do best without drafts.
            eager=not batch and (learning is None or learning.eager(each.name)),
            prices=functools.partial(learning.prices, each.name) if learning and stops else None,
        )
        make = functools.partial(each.make, setup)
        proposer = make()
        made[each.name] = RowByRow(make) if batch and not proposer.batches else proposer
    if len(made) > 1:
        return FirstOf(made, learning.limit if learning else lambda name, most, rows: most)
    return next(iter(made.values()), None)
