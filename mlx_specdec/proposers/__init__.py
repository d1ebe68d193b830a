"""Who guesses: the table of drafters.

A drafter is a module of this package with a function `drafter(pair)`, which says what a loaded pair
brings for it, and a sentence MISSING for pairs that bring nothing. Modules are imported when they
are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from .drafter import Drafter, LoadedPair

DRAFTERS = {
    "ngram": "lookup",
    "draft": "draft_model",
    "dspark": "hidden_state",
    "dflash2": "hidden_state",
    "dflash": "hidden_state",
    "peagle": "hidden_state",
    "eagle3": "hidden_state",
    "mtp": "hidden_state",
    "eagle": "hidden_state",
    "gemma4_assistant": "hidden_state",
    "medusa": "medusa",
}
"""Name -> module. The order is the one in which `auto` prefers those that need weights."""


def find(name: str, pair: LoadedPair) -> Drafter | None:
    """The named drafter of a pair; None where the pair brings nothing for it."""
    made: Drafter | None = import_module(f".{DRAFTERS[name]}", __name__).drafter(pair)
    # One module may know several names, of which a pair brings one.
    return made if made is not None and made.name == name else None


def missing(name: str, pair: LoadedPair) -> str:
    """What to tell a user whose pair does not have this drafter."""
    if reason := pair.unusable.get(name):
        return reason
    sentence: str | Mapping[str, str] = import_module(f".{DRAFTERS[name]}", __name__).MISSING
    return sentence if isinstance(sentence, str) else sentence[name]
