"""What earlier texts have taught of a pair and its drafters, read and kept."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import mlx.core as mx

from .. import blas
from ..costs import cache as cost_cache
from ..costs import experience
from ..costs.acceptance import Acceptance
from ..costs.cache import CostKey
from ..costs.experience import TextKey
from ..costs.learned import Learned
from ..decoding.auto_length import AutoLength
from ..decoding.budget import Budget
from ..decoding.draft_length import DraftLength
from ..decoding.lengths_by_rows import LengthsByRows
from ..decoding.lengths_by_source import LengthsBySource
from ..drafting import forced, prediction
from ..drafting.drafter import Drafter
from ..options import Options
from ..pair import Pair

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
