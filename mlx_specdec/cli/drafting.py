"""Who drafts, and how much: the flags, and the pair that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoints.disk import show
from ..errors import OptionError
from ..models.cache_settings import CacheSettings
from ..options import SELF, Options, proposers
from . import render
from .flags import Flags, flag
from .groups import Models
from .pairs import load_pair, named

if TYPE_CHECKING:
    from ..engine.generate import Pair

SEARCHING = ("auto", "ngram")
"""Proposers that look things up."""
DRAFTLESS = ("ngram", "medusa", "none")
"""Proposers for which no draft is loaded."""


@dataclass(frozen=True)
class Drafting(Flags):
    """Who drafts, and how much."""

    panel = "Drafting"
    proposer: str | None = flag(
        None,
        "The drafter: a draft model (draft), n-gram lookup in the prompt and the text (ngram), "
        "Medusa heads (medusa), a drafter on the target's hidden states by its kind (dspark, "
        "dflash2, dflash, peagle, eagle3, mtp, eagle, gemma4_assistant), lookup before one of the "
        "others (auto), or none.",
        metavar="NAME",
        autocompletion=proposers,
    )
    num_draft: str = flag(
        "auto",
        "The number of draft tokens in a round; auto learns it on this machine.",
        "--num-draft-tokens",
        metavar="N|auto",
    )
    speculate: int | None = flag(
        None, "The same number, drafted by n-gram lookup where nothing else is named."
    )
    ngram_min: int | None = flag(
        None,
        "The shortest match that lookup trusts, in tokens.",
        show_default="2, or 4 before another drafter",
    )
    ngram_choice: Literal["recent", "frequent"] = flag(
        "recent", "The continuation that lookup takes where there are several."
    )
    lookup_file: list[Path] | None = flag(
        None,
        "A text that lookup searches as well; the flag may be repeated.",
        metavar="FILE",
        exists=True,
        dir_okay=False,
    )
    regular_decode: bool = flag(False, "Decode plainly, without speculation.")

    @property
    def searches(self) -> bool:
        """Whether documents are searched."""
        return bool(self.lookup_file) and not self.regular_decode

    def chosen_proposer(self, models: Models) -> str | None:
        """The drafter that the flags ask for together. Raises OptionError."""
        proposer: str | None = self.proposer
        if self.lookup_file and proposer is None:
            proposer = "auto"
        elif self.speculate is not None and self.guessed(models):
            proposer = "ngram"
        if self.searches and proposer not in SEARCHING:
            raise OptionError("--lookup-file is for lookup: give --proposer ngram or auto")
        return proposer

    def guessed(self, models: Models) -> bool:
        """Whether neither a drafter nor a draft model was named."""
        return self.proposer is None and models.draft_model is None

    def for_options(self) -> dict[str, Any]:
        number = self.num_draft if self.speculate is None else str(self.speculate)
        return {
            **super().for_options(),
            "regular": self.regular_decode,
            "num_draft": count_or_auto("--num-draft", number),
        }


def load_drafting(
    models: Models,
    drafting: Drafting,
    caches: CacheSettings,
    asked: Options,
    *,
    random_weights: bool = False,
    told: bool = True,
) -> tuple[Pair, Options]:
    """Load what drafts and what it drafts for, documents included, and settle who that is.

    told: say what a draft takes that nobody named. Raises as `pairs.load_pair` and
    `assemble.with_documents` do."""
    model, draft_model = named(models)
    if asked.regular or asked.proposer in DRAFTLESS:
        draft_model = None
    pair = load_pair(
        model,
        draft_model,
        caches=caches,
        random_weights=random_weights,
        told=told,
        **models.loading(),
    )
    if drafting.searches:
        from ..engine.generate import with_documents

        with render.progress("indexing what to look up") as report:
            pair = with_documents(pair, drafting.lookup_file or (), progress=report)
    if draft_model == SELF and pair.draft is not None and told:
        render.tell(f"drafting with the target's own layers: {show(pair.draft_bytes)} beside it")
    if pair.heads is not None and drafting.guessed(models) and not drafting.lookup_file:
        asked = replace(asked, proposer=None)
    return pair, asked


def count_or_auto(name: str, text: str) -> int | Literal["auto"]:
    """What a flag says that takes a number or auto. Raises OptionError."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{name} must be a number or auto, not {text!r}") from None
