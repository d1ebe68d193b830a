"""The table of proposers. Imports no MLX; the modules of the table are imported when needed.

Each module has a function `drafter(pair)`, which returns a Drafter or None, and an error message
MISSING for pairs for which it returns None."""

from importlib import import_module

from ..models.drafters import DRAFTER_KINDS
from .drafter import Drafter, LoadedPair

DRAFTERS = {
    "ngram": "lookup",
    "draft": "draft_model",
    **dict.fromkeys(DRAFTER_KINDS, "hidden_state"),
    "medusa": "medusa",
}
"""Module per name. `auto` prefers proposers with weights in this order."""


def find(name: str, pair: LoadedPair) -> Drafter | None:
    """Return the named drafter of a pair, or None if the pair does not have it."""
    made: Drafter | None = import_module(f".{DRAFTERS[name]}", __name__).drafter(pair)
    # One module can serve several names, but a pair has at most one of them.
    return made if made is not None and made.name == name else None


def missing(name: str) -> str:
    """Return the error message for a pair that does not have this drafter."""
    if name in DRAFTER_KINDS:
        from ..models.drafters.kinds import kind_named

        return kind_named(name).missing
    sentence: str = import_module(f".{DRAFTERS[name]}", __name__).MISSING
    return sentence
