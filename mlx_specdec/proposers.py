"""Who proposes for a pair, and how many tokens a round: the table of names for drafting.

Knows every proposer and what a pair brings for it. Knows nothing of decoding a text.
"""

from __future__ import annotations

from .checkpoints import medusa_files
from .contracts import Proposer
from .decoding.draft_length import AutoLength
from .drafting.draft_model import DraftModel
from .drafting.lookup import PromptLookup
from .drafting.medusa import Medusa
from .errors import OptionError
from .options import Options
from .pair import Pair


def proposer_kind(pair: Pair, options: Options) -> str:
    """Who proposes: "draft", "ngram", "medusa" or "none".

    Raises OptionError where there is no such draft, or there are no heads.
    """
    if options.regular or options.num_draft == 0:
        return "none"
    if options.proposer == "draft" and pair.draft is None:
        raise OptionError("there is no draft model to propose: name one with draft-model")
    if options.proposer == "medusa" and pair.heads is None:
        raise OptionError(
            "there are no Medusa heads to propose: give a model whose config.json has "
            f"{medusa_files.COUNT}"
        )
    heads = "none" if pair.heads is None else "medusa"
    return options.proposer or (heads if pair.draft is None else "draft")


def make_proposer(pair: Pair, options: Options) -> Proposer | None:
    """What proposes for one text; None decodes plainly. Raises as `proposer_kind` does."""
    kind = proposer_kind(pair, options)
    if kind == "ngram":
        return PromptLookup(options.ngram_min, options.ngram_choice == "frequent", pair.documents)
    if kind == "medusa" and pair.heads is not None:
        return Medusa(pair.heads, options.sampling, pair.vocabulary)
    if kind == "none" or pair.draft is None:
        return None
    return DraftModel(pair.draft, options.sampling, pair.vocabulary, pair.translation)


def most_drafted(pair: Pair, options: Options) -> int:
    """The longest draft worth considering."""
    heads = pair.heads if proposer_kind(pair, options) == "medusa" else None
    return AutoLength.MOST if heads is None else min(heads.count, AutoLength.MOST)


def proposer_bytes(pair: Pair, options: Options) -> int:
    """Size of the weights that propose."""
    kind = proposer_kind(pair, options)
    if kind == "medusa" and pair.heads is not None:
        return pair.heads.nbytes
    return pair.draft.nbytes if kind == "draft" and pair.draft is not None else 0
