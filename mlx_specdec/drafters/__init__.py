"""Who drafts for a sequence and how much: from a pair and its options to a proposer and a length.

Names are looked up in the table of `drafting`; nothing here depends on which ones there are, but
that "ngram" is asked first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from ..contracts import Proposer
from ..costs import cache as cost_cache
from ..costs.acceptance import Acceptance
from ..costs.learned import Learned
from ..decoding.auto_length import AutoLength
from ..decoding.budget import Budget
from ..decoding.draft_length import DraftLength, FixedLength
from ..decoding.lengths_by_rows import LengthsByRows
from ..decoding.lengths_by_source import LengthsBySource
from ..decoding.rival import Rival
from ..drafting import DRAFTERS, find, forced, missing
from ..drafting.drafter import Drafter
from ..drafting.first_of import FirstOf
from ..drafting.row_by_row import RowByRow
from ..errors import OptionError
from ..options import Options
from ..pair import Pair
from .learned import cost_key, device_name, earlier_texts, keep_costs, known_costs, weighted
from .trials import Trials

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
    certain = () if options.constraint is None else (forced.drafter(pair),)
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
        make = functools.partial(each.make, options, place < last)
        proposer = make()
        # Batches often do best without.
        proposer.wanted = not batch and _wanted(lengths, each.name)
        its = _controller(lengths, each.name)
        if each.stops and not batch and isinstance(its, AutoLength):
            proposer.prices = its.prices
        made[each.name] = RowByRow(make) if batch and not proposer.batches else proposer
    return FirstOf(made, limit) if len(made) > 1 else next(iter(made.values()), None)


def _controller(lengths: DraftLength, name: str) -> DraftLength | None:
    if isinstance(lengths, LengthsByRows):
        lengths = lengths.by_rows[1]
    return lengths.learning.get(name) if isinstance(lengths, LengthsBySource) else lengths


def _wanted(lengths: DraftLength, name: str) -> bool:
    its = _controller(lengths, name)
    return not isinstance(its, AutoLength) or its.reads_along


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
