"""What generations share: a loaded target, its tokenizer, and what it brings to draft with."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from .cache_settings import CacheSettings
from .checkpoints import shards
from .checkpoints.formats import medusa as medusa_files
from .checkpoints.layouts import as_directory
from .checkpoints.source import resolve, resolve_config
from .contracts import Progress, ignore_progress
from .drafting import document_cache
from .drafting.document_cache import IndexKey
from .drafting.document_index import DocumentIndex
from .drafting.translation import Translation
from .errors import CheckpointError, OptionError, SourceError
from .models.base import Base
from .models.loading import Loaded, load_model
from .models.medusa_heads import MedusaHeads, attach
from .models.self_draft import self_draft
from .models.stand_in import stand_in
from .options import SELF
from .text import documents
from .text.tokenizer import Tokenizer, load_tokenizer
from .text.vocabulary import common_size, shared_tokens

DRAFT_VOCABS = ("same", "intersect")
SELF_BITS = 4
"""Of the draft "self", unless told otherwise."""
READING = 0.75
"""Share of tokenizing in the time that an index of documents takes."""
STEPS = 1000


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer, and a draft model where there is one; shared by many generations.

    vocabulary: number of token ids that target and tokenizer both know; every distribution has
    this width. translation: for a draft whose vocabulary is another. documents: what lookup
    searches beside prompt and text. heads: of the target, where it has some. draft_bytes: what
    the draft takes beside the target, in bytes. task_prefix: what the target wants every prompt to
    begin with; mostly nothing.
    """

    name: str
    draft_name: str | None
    target: Base
    draft: Base | None
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocabulary: int
    dtype: str
    load_seconds: float
    translation: Translation | None = None
    documents: DocumentIndex | None = None
    heads: MedusaHeads | None = None
    draft_bytes: int = 0
    task_prefix: str = ""


@dataclass(frozen=True)
class Loading:
    """How both models of a pair are loaded; see `load`. fetching: seconds that were spent on having
    the files here."""

    dtype: str
    caches: CacheSettings | None
    random_weights: bool
    progress: Progress | None
    fetching: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Draft:
    """A draft beside its target. vocabulary: how many ids both have."""

    model: Base
    vocabulary: int
    nbytes: int
    translation: Translation | None = None


def load(
    model: str | Path,
    draft_model: str | Path | None = None,
    *,
    revision: str | None = None,
    adapter_path: str | Path | None = None,
    dtype: str = "auto",
    q_bits: int | None = None,
    draft_q_bits: int | None = None,
    caches: CacheSettings | None = None,
    draft_vocab: str = "same",
    random_weights: bool = False,
    progress: Progress | None = None,
) -> Pair:
    """Load a target and, if named, a draft model with the same vocabulary.

    model, draft_model: a directory or a name on the Hugging Face Hub; a model that is Medusa heads
    brings the base model that it names, and the draft "self" is the target's own layers at
    `draft_q_bits` (4). adapter_path: a directory with an adapter that mlx-lm has trained for the
    target. dtype: "auto" computes in float32 on the CPU and as stored elsewhere; or
    float32, float16, bfloat16. q_bits: quantize on load. caches: quantized or cut KV caches; a
    draft that cannot have them keeps its own. draft_vocab: "same" refuses a draft with other
    tokens, "intersect" drafts the tokens that both have. random_weights: for measuring; a model
    without weights here gets random ones, no more than config.json is downloaded, and vocabularies
    are not compared. Raises SourceError, CheckpointError, VocabularyError, OptionError.
    """
    if draft_vocab not in DRAFT_VOCABS:
        raise OptionError(f"draft-vocab must be same or intersect, not {draft_vocab!r}")
    started = time.perf_counter()
    given = Loading(dtype, caches, random_weights, progress)
    adapter = None if adapter_path is None else Path(adapter_path)
    target, tokenizer, heads = _load_target(str(model), revision, q_bits, given, adapter)
    draft: _Draft | None = None
    if str(draft_model) == SELF:
        own, added = self_draft(target.model, draft_q_bits or SELF_BITS)
        draft = _Draft(own, min(target.model.vocabulary, tokenizer.size), added)
    elif draft_model is not None:
        loaded, draft_tokenizer = _load_draft(str(draft_model), draft_q_bits, given)
        draft = _beside(target, tokenizer, loaded, draft_tokenizer, draft_vocab, random_weights)
    width = min(target.model.vocabulary, tokenizer.size)
    return Pair(
        name=str(model),
        draft_name=None if draft_model is None else str(draft_model),
        target=target.model,
        draft=None if draft is None else draft.model,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(target.eos_token_ids or tokenizer.eos_token_ids),
        vocabulary=width if draft is None else draft.vocabulary,
        dtype=target.dtype,
        load_seconds=time.perf_counter() - started - sum(given.fetching),
        translation=None if draft is None else draft.translation,
        heads=heads,
        draft_bytes=0 if draft is None else draft.nbytes,
        task_prefix=target.task_prefix,
    )


def with_documents(
    pair: Pair, files: Sequence[str | Path], *, progress: Progress | None = None
) -> Pair:
    """The same models, with documents for the proposer "ngram" to search beside prompt and text.

    files: UTF-8 texts. Their index is built once and kept in the platform's cache directory.
    Raises DocumentError.
    """
    paths, report = [Path(file) for file in files], progress or ignore_progress
    key = IndexKey(documents.digest(paths), pair.tokenizer.digest, pair.vocabulary)
    index = document_cache.read(key)
    if index is None:
        read = documents.tokens(paths, pair.tokenizer, _share(report, 0.0, READING))
        index = document_cache.build(key, read, _share(report, READING, 1.0))
    return replace(pair, documents=index)


def _load_target(
    name: str, revision: str | None, q_bits: int | None, given: Loading, adapter: Path | None
) -> tuple[Loaded, Tokenizer, MedusaHeads | None]:
    directory = _fetch(name, revision, given)
    if not medusa_files.is_medusa(directory):
        return (*_load_from(directory, q_bits, given, adapter), None)
    read = medusa_files.read(directory)
    base, tokenizer = _load_from(_base(directory, read.base, given), q_bits, given, adapter)
    return base, tokenizer, attach(read, base.model)


def _base(heads: Path, name: str, given: Loading) -> Path:
    """Where the base model of Medusa heads is: beside them, or where its name says."""
    beside = heads / name
    try:
        base = beside if beside.is_dir() else _fetch(name, None, given)
    except SourceError as problem:
        raise SourceError(f"{heads} names a base model that is missing: {problem}") from problem
    if medusa_files.is_medusa(base):
        raise CheckpointError(f"{name}, the base model of {heads}, is Medusa heads too")
    return base


def _load_draft(name: str, q_bits: int | None, given: Loading) -> tuple[Loaded, Tokenizer]:
    directory = _fetch(name, None, given)
    try:
        return _load_from(directory, q_bits, given)
    except OptionError:
        # The text is the target's whatever the draft remembers; what is wrong comes again.
        return _load_from(directory, q_bits, replace(given, caches=None))


def _beside(
    target: Loaded,
    tokenizer: Tokenizer,
    draft: Loaded,
    draft_tokenizer: Tokenizer,
    draft_vocab: str,
    random_weights: bool,
) -> _Draft:
    """Raises OptionError for a draft of another kind, VocabularyError for one of other tokens."""
    if draft.kind != target.kind:
        raise OptionError(
            f"the draft model is {draft.kind} and the target {target.kind}: give a draft of "
            "the target's own kind"
        )
    widths = target.model.vocabulary, draft.model.vocabulary
    width = min(target.model.vocabulary, tokenizer.size)
    translation: Translation | None = None
    if random_weights:
        width = min(width, draft.model.vocabulary)
    elif draft_vocab == "intersect":
        translation = Translation(*shared_tokens(tokenizer, draft_tokenizer, *widths))
    else:
        width = common_size(tokenizer, draft_tokenizer, *widths)
    return _Draft(draft.model, width, draft.model.nbytes, translation)


def _fetch(name: str, revision: str | None, given: Loading) -> Path:
    started = time.perf_counter()
    try:
        if given.random_weights:
            return resolve_config(name, revision=revision)
        return resolve(name, revision=revision, progress=given.progress)
    finally:
        given.fetching.append(time.perf_counter() - started)


def _load_from(
    source: Path, q_bits: int | None, given: Loading, adapter: Path | None = None
) -> tuple[Loaded, Tokenizer]:
    with ExitStack() as held:
        directory = held.enter_context(as_directory(source))
        if given.random_weights and not shards.present(directory):
            if adapter is not None:
                raise OptionError(f"{directory} has no weights to adapt: leave adapter-path out")
            return stand_in(directory, dtype=given.dtype, q_bits=q_bits, caches=given.caches)
        loaded = load_model(
            directory, dtype=given.dtype, q_bits=q_bits, caches=given.caches, adapter=adapter
        )
        tokenizer = load_tokenizer(directory, kind=loaded.kind)
        # Files of a chat template are read when it is first asked for.
        weakref.finalize(tokenizer, held.pop_all().close)
    return loaded, tokenizer


def _share(report: Progress, begin: float, end: float) -> Callable[[int, int], None]:
    """Reports a part of some work as the stretch from `begin` to `end` of the whole."""

    def part(done: int, total: int) -> None:
        report(round(STEPS * (begin + (end - begin) * done / max(total, 1))), STEPS)

    return part
