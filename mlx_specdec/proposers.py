"""Who proposes for a pair: the table of names for drafting.

Knows every proposer and what a pair brings for it. Knows nothing of decoding a text.
"""

from __future__ import annotations

from .checkpoints.formats import medusa as medusa_files
from .contracts import Proposer
from .decoding.draft_length import AutoLength, DraftLength
from .decoding.lengths_by_source import LengthsBySource
from .drafting.draft_model import DraftModel
from .drafting.first_of import FirstOf
from .drafting.lookup import PromptLookup
from .drafting.medusa import Medusa
from .errors import OptionError
from .options import Options
from .pair import Pair

ALONE, BEFORE_OTHERS = 2, 4
"""Shortest match, in tokens, that lookup trusts: a shorter one is worse than a draft."""


def sources(pair: Pair, options: Options) -> tuple[str, ...]:
    """The proposers of a text in the order in which they are asked: of "ngram", "draft" and
    "medusa"; none decodes plainly.

    Raises OptionError where there is no such draft, or there are no heads.
    """
    if options.regular or options.num_draft == 0 or options.proposer == "none":
        return ()
    if options.proposer == "draft" and pair.draft is None:
        raise OptionError("there is no draft model to propose: name one with draft-model")
    if options.proposer == "medusa" and pair.heads is None:
        raise OptionError(
            "there are no Medusa heads to propose: give a model whose config.json has "
            f"{medusa_files.COUNT}"
        )
    heads = ("medusa",) if pair.heads is not None else ()
    own = ("draft",) if pair.draft is not None else heads
    if options.proposer == "auto" or _takes_auto(options, own):
        return ("ngram", *own)
    return own if options.proposer is None else (options.proposer,)


def _takes_auto(options: Options, own: tuple[str, ...]) -> bool:
    """Whether lookup goes first though nobody asked for it: its length must be its own, and what
    it finds must be judged."""
    chooses = options.num_draft == "auto" and options.simulated_acceptance is None
    return options.proposer is None and bool(own) and chooses


def proposer_kind(pair: Pair, options: Options) -> str:
    """Who proposes, in a word: a source, "auto" for several, or "none". Raises as `sources`."""
    names = sources(pair, options)
    return "auto" if len(names) > 1 else "".join(names) or "none"


def make_proposer(pair: Pair, options: Options, lengths: DraftLength) -> Proposer | None:
    """What proposes for one text; None decodes plainly. Raises as `sources` does.

    lengths: what chooses the draft's length; of several proposers each has its own.
    """
    made = {name: _make(name, pair, options) for name in sources(pair, options)}
    if isinstance(lengths, LengthsBySource):
        return FirstOf(made, lengths.limit)
    return next(iter(made.values()), None)


def most_drafted(pair: Pair, source: str) -> int:
    """The longest draft of a source that is worth considering."""
    if source == "medusa" and pair.heads is not None:
        return min(pair.heads.count, AutoLength.MOST)
    return AutoLength.MOST


def proposer_bytes(pair: Pair, source: str) -> int:
    """Size of the weights of a source."""
    if source == "medusa" and pair.heads is not None:
        return pair.heads.nbytes
    return pair.draft.nbytes if source == "draft" and pair.draft is not None else 0


def _make(source: str, pair: Pair, options: Options) -> Proposer:
    if source == "medusa" and pair.heads is not None:
        return Medusa(pair.heads, options.sampling, pair.vocabulary)
    if source == "draft" and pair.draft is not None:
        return DraftModel(pair.draft, options.sampling, pair.vocabulary, pair.translation)
    alone = len(sources(pair, options)) == 1 or pair.documents is not None
    least = options.ngram_min or (ALONE if alone else BEFORE_OTHERS)
    return PromptLookup(least, options.ngram_choice == "frequent", pair.documents)
