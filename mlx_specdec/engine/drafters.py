"""The drafters of a pair: which it has, which of them the options choose, and how long they
draft."""

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from .. import system
from ..core import worth as costs
from ..core.options import Options
from ..core.proposer import LONGEST_DRAFT, Drafter, GroupProposer, Setup
from ..core.worth import Worth
from ..errors import OptionError
from ..models.drafters.kinds import kind_named
from ..proposers.adapters import FirstOf
from ..proposers.draft_model import DraftModel
from ..proposers.hidden_state import HiddenStateDrafter, Medusa
from ..proposers.lookup import FORCED, PREDICTION, Forced, PredictedText, PromptLookup, match_rates
from .pair import Pair

TEMPERATURE_RANGES = (0.0, 0.4, 0.8, 1.2)
"""Upper bounds of ranges of temperature. All temperatures of a range share the saved acceptance
rates."""
FREE = "ngram"
"""Name of the drafter that costs nothing. `auto` calls it before the one with weights."""
FORCING = Drafter(FORCED, lambda setup: Forced())
"""The drafter of tokens that a grammar forces, which every pair has."""
PREDICTING = Drafter(PREDICTION, lambda setup: PredictedText())
"""The drafter of the text that a client predicts, which every pair has."""
MISSING = {
    "draft": "there is no draft model to propose: name one with draft-model",
    "medusa": (
        "there are no Medusa heads to propose: give a model whose config.json has medusa_num_heads"
    ),
}
"""Name of a proposer -> the error message for pairs that do not have it. The other messages are in
`models/drafters/`."""
MLX_VERSION = version("mlx")  # looking it up takes as long as a step of a small model


def available(pair: Pair) -> list[Drafter]:
    """Return the drafters that a pair has. `auto` prefers those with weights in this order."""
    lookup = partial(PromptLookup, pair.documents, pair.history, match_rates())
    made, name = [Drafter(FREE, lookup)], pair.draft_name or ""
    if (draft := pair.draft) is not None:
        make = partial(DraftModel, draft, pair.translation)
        made.append(Drafter("draft", make, nbytes=draft.nbytes, identity=name))
    if (network := pair.drafter_network) is not None:
        longest, hidden = min(network.most, LONGEST_DRAFT), partial(HiddenStateDrafter, network)
        made.append(Drafter(network.kind, hidden, longest, network.nbytes, name, network.stops))
    if (heads := pair.heads) is not None:
        longest = min(heads.count, LONGEST_DRAFT)
        made.append(Drafter("medusa", lambda setup: Medusa(heads), longest, heads.nbytes))
    return made


def pair_key(pair: Pair) -> dict[str, object]:
    """Return the properties of a pair and a machine on which the costs of rounds depend."""
    machine = {"device": system.device_name(), "mlx": MLX_VERSION, "blas": system.blas_name()}
    target = {"target": pair.name, "target_bytes": pair.target.nbytes, "dtype": pair.dtype}
    return machine | target


def drafting(options: Options) -> tuple[object, ...]:
    """Return the options that decide on drafters, draft length and kind of passes. Requests share
    passes only if these are equal."""
    length, free = (options.num_draft, options.cost_cache), options.constraint is None
    return options.proposer, length, options.regular, options.exact, free


def measured(pair: Pair, drafter: Drafter, options: Options) -> Drafter:
    """Return a drafter with the names under which its costs and acceptance are saved."""
    name = f"{drafter.identity or drafter.name}, {drafter.nbytes} bytes"
    sampled = ", sampled" if options.temperature > 0 else ""
    warmth = bisect_left(TEMPERATURE_RANGES, options.temperature)
    return replace(
        drafter,
        most=min(drafter.most, pair.target.exact.most_drafted) if options.exact else drafter.most,
        costs=(name if drafter.nbytes else "free") + sampled + (", exact" if options.exact else ""),
        text=f"{name}, {options.rule_name} {options.delta:g}, temperature {warmth}",
    )


def drafters(pair: Pair, options: Options) -> tuple[Drafter, ...]:
    """Return the drafters of a sequence in the order in which they are called.

    There are none if the target's rows disagree. Raises OptionError if the pair does not have the
    drafter that the options name."""
    if options.regular or options.num_draft == 0 or options.proposer == "none":
        return ()
    made = available(pair)
    if (name := options.proposer) not in (None, "auto"):
        chosen = [drafter for drafter in made if drafter.name == name]
        if not chosen:
            missing = MISSING.get(name) or kind_named(name).missing
            raise OptionError(pair.unusable.get(name) or missing)
    else:
        chosen = [drafter for drafter in made if not drafter.free]
        automatic = options.num_draft == "auto"
        if not automatic:
            # The best one is only known if draft lengths are measured.
            chosen = chosen[:1]
        # The free one is called first if it chooses its own length, or if nothing else drafts.
        if name == "auto" or automatic or not chosen:
            chosen = [*(drafter for drafter in made if drafter.name == FREE), *chosen]
    if options.constraint is not None:
        chosen = [FORCING, *chosen]
    return tuple(chosen) if pair.target.rows_agree else ()


def proposer_kind(chosen: Sequence[Drafter]) -> str:
    """Return the name of the only drafter, "auto" for several drafters, or "none"."""
    names = [drafter.name for drafter in chosen]
    return "auto" if len(names) > 1 else "".join(names) or "none"


def most_drafted(pair: Pair, options: Options) -> int:
    """Return the maximum number of draft tokens of a sequence in a round."""
    if options.regular or options.proposer == "none":
        return 0
    most = sys.maxsize if options.num_draft == "auto" else options.num_draft
    return min(most, pair.target.exact.most_drafted) if options.exact else most


def worth_of(pair: Pair, chosen: Sequence[Drafter], options: Options) -> Worth:
    """Return the choice of the draft length that the options ask for, with the saved costs of the
    pair."""
    chosen = [measured(pair, drafter, options) for drafter in chosen]
    if options.num_draft != "auto":
        return Worth(options.num_draft, chosen, pair.learned)
    if not chosen:
        return Worth(0)
    memory = costs.memory(pair_key(pair)) if options.cost_cache else pair.learned
    return Worth(None, chosen, memory)


def make_proposer(chosen: Sequence[Drafter], worth: Worth, *, batch: bool = False) -> GroupProposer:
    """Return the proposer of rows. batch: Whether there may be several."""
    made: dict[str, GroupProposer] = {}
    for place, drafter in enumerate(chosen):
        # Batches often do best without drafts.
        eager = lambda name=drafter.name: not batch and worth.limit(name, 1) > 0  # noqa: E731
        prices = partial(worth.prices, drafter.name)
        made[drafter.name] = drafter.make(Setup(place < len(chosen) - 1, eager, prices))
    return FirstOf(made, worth.limit) if len(made) != 1 else made.popitem()[1]
