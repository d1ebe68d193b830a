"""What drafts for a target, from its name or from the target itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoints import files
from ..errors import CheckpointError, OptionError
from ..models import drafters as networks
from ..models.base import Base
from ..models.drafters import kinds as speculators
from ..models.drafters import mtp
from ..models.drafters.files import SpeculatorFiles
from ..models.loading import Loaded
from ..models.number_format import NumberFormat
from ..models.self_draft import self_draft
from ..options import SELF
from ..text.tokenizer import Tokenizer
from ..text.vocabulary import Translation, common_size, shared_tokens
from .pair import Pair
from .sources import Loading

SELF_BITS = 4
"""Of the draft "self", unless told otherwise."""


@dataclass(frozen=True)
class Wanted:
    """What is to draft. source: where it is; None for the target's own layers. riding: what reads
    hidden states there."""

    name: str
    source: Path | None
    riding: SpeculatorFiles | None


def wanted_of(draft_model: str | Path | None, given: Loading) -> Wanted | None:
    """What is named, found or fetched; None where nothing is."""
    if draft_model is None:
        return None
    name = str(draft_model)
    source = None if name == SELF else given.fetch(name, None)
    return Wanted(name, source, None if source is None else speculators.read(source))


def with_wanted(
    pair: Pair, kind: str, wanted: Wanted, q_bits: int | None, draft_vocab: str, given: Loading
) -> Pair:
    """With what is to draft. kind: of the target. Raises as `load` does."""
    pair = replace(pair, draft_name=wanted.name)
    if wanted.source is None:
        own, added = self_draft(pair.target, q_bits or SELF_BITS)
        return replace(pair, draft=own, draft_bytes=added)
    if wanted.riding is not None:
        network = networks.attach(wanted.riding, pair.target, given.numbers(q_bits))
        return replace(pair, speculator=network, draft_bytes=network.nbytes)
    alone = replace(given, ranks=None, pipeline=False)
    loaded, tokenizer = _load_draft(wanted.source, q_bits, alone)
    if loaded.kind != kind:
        raise OptionError(
            f"the draft model is {loaded.kind} and the target {kind}: give a draft of the target's "
            "own kind"
        )
    pair = replace(pair, notes=(*pair.notes, *filter(None, [loaded.note])))
    return _with_draft(pair, loaded.model, tokenizer, draft_vocab, given.random_weights)


def check_early(riding: SpeculatorFiles, target: Path) -> None:
    """Raises CheckpointError before any weights are read, where the target's config.json tells that
    the drafter was made for another target."""
    if (target / "config.json").is_file():
        riding.check_config(files.read_config(target))


def with_own_layers(pair: Pair, directory: Path, numbers: NumberFormat) -> Pair:
    """With the layers for multi-token prediction that the target's checkpoint carries. Where they
    cannot be used the target can all the same."""
    if not (directory / "config.json").is_file():
        return pair
    try:
        own = mtp.of_target(directory, files.read_config(directory))
        if own is None:
            return pair
        network = networks.attach(own, pair.target, numbers)
    except (CheckpointError, OptionError) as problem:
        return replace(pair, unusable={"mtp": str(problem)})
    return replace(pair, speculator=network, draft_bytes=network.nbytes)


def _load_draft(directory: Path, q_bits: int | None, given: Loading) -> tuple[Loaded, Tokenizer]:
    try:
        return given.load(directory, q_bits)
    except OptionError:
        # The text is the target's whatever the draft remembers; what is wrong comes again.
        return replace(given, caches=None).load(directory, q_bits)


def _with_draft(
    pair: Pair, draft: Base, tokenizer: Tokenizer, draft_vocab: str, random_weights: bool
) -> Pair:
    """Raises VocabularyError for a draft of other tokens."""
    widths = pair.target.vocabulary, draft.vocabulary
    pair = replace(pair, draft=draft, draft_bytes=draft.nbytes)
    if random_weights:
        return replace(pair, vocabulary=min(pair.vocabulary, draft.vocabulary))
    if draft_vocab == "intersect":
        shared = shared_tokens(pair.tokenizer, tokenizer, *widths)
        return replace(pair, translation=Translation(*shared))
    return replace(pair, vocabulary=common_size(pair.tokenizer, tokenizer, *widths))
