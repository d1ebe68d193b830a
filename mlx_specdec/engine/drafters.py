"""What earlier texts have taught of a pair and its drafters, read and kept."""

from __future__ import annotations

import functools
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import mlx.core as mx

from .. import process as blas
from ..draft_length import cache as cost_cache
from ..draft_length import experience
from ..draft_length.acceptance import Acceptance
from ..draft_length.auto_length import AutoLength
from ..draft_length.budget import Budget
from ..draft_length.by_rows import LengthsByRows
from ..draft_length.by_source import LengthsBySource
from ..draft_length.cache import CostKey
from ..draft_length.experience import TextKey
from ..draft_length.learned import Learned
from ..draft_length.length import DraftLength, FixedLength
from ..draft_length.rival import Rival
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


def weighted(chosen: Sequence[Drafter]) -> int:
    """How many of them have weights."""
    return sum(each.nbytes > 0 for each in chosen)


def keep_costs(
    pair: Pair, chosen: Sequence[Drafter], options: Options, lengths: DraftLength
) -> None:
    """Write down what sequences have taught, if it is to be kept."""
    if not options.cost_cache:
        return
    by_rows = lengths.by_rows if isinstance(lengths, LengthsByRows) else {1: lengths}
    for rows, controller in by_rows.items():
        for name, its in _learning(chosen, controller).items():
            [each] = (each for each in chosen if each.name == name)
            key = cost_key(pair, chosen, each, options, rows)
            cost_cache.merge(key, its.learned())
            if controller is lengths or rows == max(by_rows):
                # Batches of all sizes share the rest.
                experience.merge(_text_key(key, options), its.experience)


def _learning(chosen: Sequence[Drafter], lengths: DraftLength) -> Mapping[str, AutoLength]:
    if isinstance(lengths, LengthsBySource):
        return lengths.learning
    return {chosen[0].name: lengths} if isinstance(lengths, AutoLength) and chosen else {}


def cost_key(
    pair: Pair, chosen: Sequence[Drafter], drafter: Drafter, options: Options, rows: int = 1
) -> CostKey:
    """What the costs of rounds of so many sequences depend on in which one of the chosen drafters
    proposes.

    Behind another one it reads what was written without it, which costs as well.
    """
    # What single requests bring is asked before all others, and costs nothing.
    own = (given.FORCED, given.PREDICTION)
    first = next((each for each in chosen if each.name not in own), drafter)
    behind = "" if drafter is first else f" behind {first.name}"
    return CostKey(
        device=device_name(),
        mlx=_version("mlx"),
        blas=blas.name(),
        target=pair.name,
        target_bytes=pair.target.nbytes,
        draft=(drafter.identity or drafter.name) + behind,
        draft_bytes=drafter.nbytes,
        dtype=pair.dtype,
        sampled=options.temperature > 0,
        rows=rows,
    )


def device_name() -> str:
    """Where MLX computes: "cpu", or the accelerator's own name."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))


def known_costs(
    pair: Pair, chosen: Sequence[Drafter], drafter: Drafter, options: Options, rows: int = 1
) -> dict[int, Learned]:
    """Costs of rounds of so many sequences, as earlier ones left them; see `cost_key`."""
    key = cost_key(pair, chosen, drafter, options, rows)
    return cost_cache.read(key) if options.cost_cache else {}


def earlier_texts(
    pair: Pair, chosen: Sequence[Drafter], drafter: Drafter, options: Options
) -> tuple[Acceptance, Budget, float]:
    """Acceptance, budget and the price of reading, as earlier texts left them. Drafters with
    weights have one budget together."""
    part = 1 / weighted(chosen) if drafter.nbytes else 1.0
    key = _text_key(cost_key(pair, chosen, drafter, options), options)
    earlier = experience.read(key) if options.cost_cache else None
    if earlier is None:
        return Acceptance(drafter.most), Budget(part=part), 0.0
    acceptance = Acceptance(drafter.most, earlier=earlier.verdicts)
    return acceptance, Budget(earlier.saved, part), earlier.reading


def _text_key(key: CostKey, options: Options) -> TextKey:
    """What acceptance depends on: no clock is in it, but how tokens are drawn and verified."""
    return TextKey(
        key.target,
        key.target_bytes,
        key.draft,
        key.draft_bytes,
        key.dtype,
        bisect_left(TEMPERATURES, options.temperature),
        f"{options.rule_name} {options.delta:g}",
    )


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
                warnings.warn(caution, RuntimeWarning, stacklevel=4)


__all__ = [
    "FREE",
    "Trials",
    "cost_key",
    "device_name",
    "drafters",
    "keep_costs",
    "make_batch_length",
    "make_draft_length",
    "make_proposer",
    "proposer_kind",
]

SIZES = tuple(1 << power for power in range(11))
"""Of batches, whose costs are kept."""
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
    last = len(chosen) - 1
    limit = (
        lengths.limit
        if isinstance(lengths, (LengthsBySource, LengthsByRows))
        else lambda name, most: most
    )
    made: dict[str, Proposer] = {}
    for place, each in enumerate(chosen):
        its = _controller(lengths, each.name)
        learning = its if isinstance(its, AutoLength) else None
        setup = Setup(
            options,
            followed=place < last,
            # Batches often do best without drafts.
            eager=not batch and (learning is None or learning.reads_along),
            prices=learning.prices if learning and each.stops and not batch else None,
        )
        make = functools.partial(each.make, setup)
        proposer = make()
        made[each.name] = RowByRow(make) if batch and not proposer.batches else proposer
    return FirstOf(made, limit) if len(made) > 1 else next(iter(made.values()), None)


def _controller(lengths: DraftLength, name: str) -> DraftLength | None:
    if isinstance(lengths, LengthsByRows):
        lengths = lengths.by_rows[1]
    return lengths.learning.get(name) if isinstance(lengths, LengthsBySource) else lengths


def make_draft_length(pair: Pair, chosen: Sequence[Drafter], options: Options) -> DraftLength:
    """What chooses the number of draft tokens, with what earlier sequences have taught."""
    if options.num_draft != "auto":
        return _by_source({each.name: FixedLength(options.num_draft) for each in chosen})
    return _by_source(
        {
            each.name: _auto(
                chosen,
                each,
                known_costs(pair, chosen, each, options),
                earlier_texts(pair, chosen, each, options),
            )
            for each in chosen
        }
    )


def make_batch_length(pair: Pair, chosen: Sequence[Drafter], options: Options) -> DraftLength:
    """The same for batches: costs are learned for each size, acceptance for all of them, and trials
    are paid together."""
    if options.num_draft != "auto":
        return make_draft_length(pair, chosen, options)
    shared = {each.name: earlier_texts(pair, chosen, each, options) for each in chosen}
    made: dict[int, dict[str, AutoLength]] = {}

    def known(each: Drafter, rows: int) -> dict[int, Learned]:
        own = made[rows][each.name].learned() if rows in made else {}
        return known_costs(pair, chosen, each, options, rows) | own

    def make(rows: int) -> DraftLength:
        lengths = {}
        for each in chosen:
            by_rows = {size: known(each, size) for size in SIZES}
            costs = by_rows[rows] or cost_cache.beside(by_rows, rows)
            lengths[each.name] = _auto(
                chosen, each, costs, shared[each.name], guessed=not by_rows[rows], rows=rows
            )
        made[rows] = lengths
        return _by_source(lengths)

    return LengthsByRows(make)


def _by_source(lengths: Mapping[str, DraftLength]) -> DraftLength:
    if len(lengths) > 1:
        return LengthsBySource(lengths)
    return next(iter(lengths.values()), FixedLength(0))


def _auto(
    chosen: Sequence[Drafter],
    drafter: Drafter,
    known: Mapping[int, Learned],
    earlier: tuple[Acceptance, Budget, float],
    *,
    guessed: bool = False,
    rows: int = 1,
) -> AutoLength:
    # Of several drafters with weights one drafts at a time.
    kind = Rival if drafter.nbytes and weighted(chosen) > 1 else AutoLength
    acceptance, budget, reading = earlier
    return kind(
        known,
        drafter.most,
        acceptance,
        free=not drafter.nbytes,
        guessed=guessed,
        budget=budget,
        reading=reading,
        source=drafter.name if len(chosen) > 1 else None,
        stops=drafter.stops,
        rows=rows,
    )
