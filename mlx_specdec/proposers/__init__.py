"""Who proposes tokens: the table of drafters. Imports no MLX; modules are imported when needed.

A drafter is a module with a function `drafter(pair)`, which returns the Drafter of a loaded pair or
None, and a sentence MISSING for pairs that have none."""

from importlib import import_module

from ..models.drafters import KINDS
from .drafter import Drafter, LoadedPair

DRAFTERS = {
    "ngram": "lookup",
    "draft": "draft_model",
    **dict.fromkeys(KINDS, "hidden_state"),
    "medusa": "medusa",
}
"""Name -> module. The order is the one in which `auto` prefers those that need weights."""


def find(name: str, pair: LoadedPair) -> Drafter | None:
    """Return the named drafter of a pair, None where the pair has none."""
    made: Drafter | None = import_module(f".{DRAFTERS[name]}", __name__).drafter(pair)
    # One module knows several names, of which a pair has one.
    return made if made is not None and made.name == name else None


def missing(name: str, pair: LoadedPair) -> str:
    """Return the error for a user whose pair does not have this drafter."""
    if reason := pair.unusable.get(name):
        return reason
    if name in KINDS:
        from ..models.drafters.kinds import kind_named

        return kind_named(name).missing
    sentence: str = import_module(f".{DRAFTERS[name]}", __name__).MISSING
    return sentence
