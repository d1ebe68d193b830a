"""Who drafts for a sequence and how much: from a pair and its options to a proposer and a length.

Names are looked up in the table of `drafting`; nothing here depends on which ones there are, but
that "ngram" is asked first.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import mlx.core as mx

from . import blas
from .contracts import Proposer
from .costs import cache as cost_cache
from .costs import experience
from .costs.cache import CostKey
from .costs.experience import TextKey
from .costs.online import Acceptance
from .decoding.draft_length import AutoLength, DraftLength, FixedLength
from .decoding.lengths_by_rows import LengthsByRows
from .decoding.lengths_by_source import LengthsBySource
from .drafting import DRAFTERS, find, forced, missing, prediction
from .drafting.drafter import Drafter
from .drafting.first_of import FirstOf
from .drafting.row_by_row import RowByRow
from .errors import OptionError
from .options import Options
from .pair import Pair

TEMPERATURES = (0.0, 0.4, 0.8, 1.2)
"""Ends of the ranges in which texts are taken to be accepted alike."""
FREE = "ngram"
"""The drafter that costs nothing: `auto` asks it before the one with weights."""
_version = functools.cache(version)
"""Looking it up takes as long as a step of a small model."""


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
            raise OptionError(missing(options.proposer))
        return (named,)
    weighted = (each for name in DRAFTERS if (each := find(name, pair)) and each.nbytes)
    own = tuple(weighted)[:1]
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
    made: dict[str, Proposer] = {}
    for place, each in enumerate(chosen):
        make = functools.partial(each.make, options, place < last)
        proposer = make()
        made[each.name] = RowByRow(make) if batch and not proposer.batches else proposer
    if len(made) > 1 and isinstance(lengths, (LengthsBySource, LengthsByRows)):
        return FirstOf(made, lengths.limit)
    if len(made) > 1:
        return FirstOf(made, lambda name, most: most)
    return next(iter(made.values()), None)


def make_draft_length(pair: Pair, chosen: Sequence[Drafter], options: Options) -> DraftLength:
    """What chooses the number of draft tokens, with the costs that earlier sequences measured."""
    return _by_source({each.name: _length(pair, chosen, each, options) for each in chosen})


def make_batch_length(pair: Pair, chosen: Sequence[Drafter], options: Options) -> DraftLength:
    """The same for batches: costs are learned for each size, and acceptance for all of them."""
    if options.num_draft != "auto":
        return make_draft_length(pair, chosen, options)
    acceptance = {each.name: Acceptance(each.most) for each in chosen}

    def make(rows: int) -> DraftLength:
        lengths: dict[str, DraftLength] = {}
        for each in chosen:
            kept = rows == 1 and options.cost_cache
            known = cost_cache.read(cost_key(pair, chosen, each, options)) if kept else None
            lengths[each.name] = AutoLength(
                known, each.most, acceptance[each.name], free=not each.nbytes
            )
        return _by_source(lengths)

    return LengthsByRows(make)


def _by_source(lengths: Mapping[str, DraftLength]) -> DraftLength:
    return (
        LengthsBySource(lengths)
        if len(lengths) > 1
        else next(iter(lengths.values()), FixedLength(0))
    )


def keep_costs(
    pair: Pair, chosen: Sequence[Drafter], options: Options, lengths: DraftLength
) -> None:
    """Write down what a sequence has taught, if it is to be kept."""
    if not options.cost_cache:
        return
    learning: Mapping[str, AutoLength] = {}
    if isinstance(lengths, LengthsBySource):
        learning = lengths.learning
    elif isinstance(lengths, AutoLength) and chosen:
        learning = {chosen[0].name: lengths}
    for each in chosen:
        if each.name in learning:
            its, key = learning[each.name], cost_key(pair, chosen, each, options)
            cost_cache.merge(key, its.measured())
            experience.merge(_text_key(key, options), its.verdicts, its.saved)


def cost_key(pair: Pair, chosen: Sequence[Drafter], drafter: Drafter, options: Options) -> CostKey:
    """What the costs of rounds depend on in which one of the chosen drafters proposes.

    Behind another one it reads what was written without it, which costs as well.
    """
    # What single requests bring is asked before all others, and costs nothing.
    own = (forced.NAME, prediction.NAME)
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
    )


def device_name() -> str:
    """Where MLX computes: "cpu", or the accelerator's own name."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))


def _length(
    pair: Pair, chosen: Sequence[Drafter], drafter: Drafter, options: Options
) -> DraftLength:
    if options.num_draft != "auto":
        return FixedLength(options.num_draft)
    free = not drafter.nbytes
    if not options.cost_cache:
        return AutoLength(None, drafter.most, free=free)
    key = cost_key(pair, chosen, drafter, options)
    earlier = experience.read(_text_key(key, options))
    if earlier is None:
        return AutoLength(cost_cache.read(key), drafter.most, free=free)
    acceptance = Acceptance(drafter.most, earlier=earlier.verdicts)
    return AutoLength(
        cost_cache.read(key), drafter.most, acceptance, free=free, saved=earlier.saved
    )


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
