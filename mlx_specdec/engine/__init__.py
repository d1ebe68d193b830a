"""From names to a pair: the target, its tokenizer, and what is to draft for it."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from .. import process as threads
from ..checkpoints.formats import medusa as medusa_files
from ..errors import CheckpointError, OptionError, SourceError
from ..interfaces import Progress
from ..models import families
from ..models.cache_settings import CacheSettings
from ..models.distributed.group import Mode, join
from ..models.drafters import kinds as speculators
from ..models.drafters.medusa import MedusaHeads, attach
from ..models.loading import Loaded
from ..options import SELF
from ..proposers.drafter import Trial
from ..text.tokenizer import Tokenizer
from .loading import Wanted, check_early, wanted_of, with_own_layers, with_wanted
from .pair import Pair
from .sources import Loading

DRAFT_VOCABS = ("same", "intersect")


def load(
    model: str | Path,
    draft_model: str | Path | None = None,
    *,
    revision: str | None = None,
    adapter_path: str | Path | None = None,
    dtype: str = "auto",
    q_bits: int | None = None,
    draft_q_bits: int | None = None,
    expand_weights: bool | None = None,
    caches: CacheSettings | None = None,
    draft_vocab: str = "same",
    random_weights: bool = False,
    distributed: Mode | None = None,
    progress: Progress | None = None,
) -> Pair:
    """Load a target and, if named, what drafts for it: a draft model with the same vocabulary, or a
    drafter that reads the target's hidden states, which its files tell. Layers for multi-token
    prediction that the target's own checkpoint carries draft where nothing else is named.

    model, draft_model: a directory or a name on the Hugging Face Hub; a model that is Medusa heads
    brings the base model that it names, and the draft "self" is the target's own layers at
    `draft_q_bits` (4). adapter_path: a directory with an adapter that mlx-lm has trained for the
    target. dtype: "auto" computes in float32 on the CPU and as stored elsewhere; or
    float32, float16, bfloat16. q_bits: quantize on load. expand_weights: compute with whole weights
    where the stored ones are quantized; None for where that is faster and the memory suffices.
    caches: quantized or cut KV caches; a draft that cannot have them keeps its own. draft_vocab:
    "same" refuses a draft with other tokens, "intersect" drafts the tokens that both have.
    random_weights: for measuring; a model without weights here gets random ones, no more than
    config.json is downloaded, and vocabularies are not compared. distributed: the ranks that
    mlx.launch has started share the target, "tensor" each layer and "pipeline" the layers; rank 0
    alone gets a pair, and the others serve it until it ends, when SystemExit is raised there.
    Raises SourceError, CheckpointError, VocabularyError, OptionError.
    """
    if draft_vocab not in DRAFT_VOCABS:
        raise OptionError(f"draft-vocab must be same or intersect, not {draft_vocab!r}")
    threads.clear_at_end()
    ranks = None if distributed is None else join()
    if distributed is not None:
        _check_divisible(draft_model, random_weights)
    started = time.perf_counter()
    pipeline = distributed == "pipeline"
    given = Loading(dtype, expand_weights, caches, random_weights, progress, ranks, pipeline)
    adapter = None if adapter_path is None else Path(adapter_path)
    draws = ranks is None or not ranks.rank
    wanted, directory = given.together(
        lambda: _sources(draft_model if draws else None, str(model), revision, given)
    )
    if ranks is not None:
        ranks.meet(directory)
    target, tokenizer, heads = given.together(
        lambda: _load_target(directory, q_bits, given, adapter)
    )
    if ranks is not None:
        target = replace(target, model=ranks.share(target.model))
    pair = Pair(
        name=str(model),
        draft_name=None,
        target=target.model,
        draft=None,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(target.eos_token_ids or tokenizer.eos_token_ids),
        vocabulary=min(target.model.vocabulary, tokenizer.size),
        dtype=target.dtype,
        load_seconds=0.0,
        heads=heads,
        task_prefix=target.task_prefix,
        notes=(target.note,) if target.note else (),
    )
    if wanted is not None:
        pair = with_wanted(pair, target.kind, wanted, draft_q_bits, draft_vocab, given)
    elif heads is None:
        pair = with_own_layers(pair, directory, given.numbers(draft_q_bits))
    return replace(pair, load_seconds=time.perf_counter() - started - sum(given.fetching))


def with_draft_model(
    pair: Pair,
    draft_model: str | Path,
    *,
    dtype: str = "auto",
    draft_q_bits: int | None = None,
    expand_weights: bool | None = None,
    caches: CacheSettings | None = None,
    draft_vocab: str = "same",
    random_weights: bool = False,
    progress: Progress | None = None,
) -> Pair:
    """The same target with another draft; see `load`."""
    given = Loading(dtype, expand_weights, caches, random_weights, progress)
    wanted = wanted_of(draft_model, given)
    assert wanted is not None
    alone = replace(
        pair,
        draft=None,
        speculator=None,
        translation=None,
        vocabulary=min(pair.target.vocabulary, pair.tokenizer.size),
        trials=defaultdict(Trial),
    )
    kind = families.of_model(pair.target).kind
    return with_wanted(alone, kind, wanted, draft_q_bits, draft_vocab, given)


def _check_divisible(draft_model: str | Path | None, random_weights: bool) -> None:
    """Raises OptionError for what a target that is shared cannot be asked for."""
    if draft_model == SELF:
        raise OptionError(
            "the draft self is made of all of the target's layers, and here no rank has them: name "
            "a draft model, or draft by lookup"
        )
    if random_weights:
        raise OptionError(
            "simulate-acceptance fills in random weights, and ranks would draw different ones: "
            "leave out distributed"
        )


def _sources(
    draft_model: str | Path | None, model: str, revision: str | None, given: Loading
) -> tuple[Wanted | None, Path]:
    """What is to draft, and where the target is."""
    wanted = wanted_of(draft_model, given)
    directory = given.fetch(model, revision)
    speculators.check_is_none(directory)
    # The config.json of Medusa heads says nothing of their base.
    if wanted is not None and wanted.riding is not None and not medusa_files.is_medusa(directory):
        check_early(wanted.riding, directory)
    return wanted, directory


def _load_target(
    directory: Path, q_bits: int | None, given: Loading, adapter: Path | None
) -> tuple[Loaded, Tokenizer, MedusaHeads | None]:
    if not medusa_files.is_medusa(directory):
        return (*given.load(directory, q_bits, adapter), None)
    read = medusa_files.read(directory)
    base, tokenizer = given.load(_base(directory, read.base, given), q_bits, adapter)
    return base, tokenizer, attach(read, base.model)


def _base(heads: Path, name: str, given: Loading) -> Path:
    """Where the base model of Medusa heads is: beside them, or where its name says."""
    beside = heads / name
    try:
        base = beside if beside.is_dir() else given.fetch(name, None)
    except SourceError as problem:
        raise SourceError(f"{heads} names a base model that is missing: {problem}") from problem
    if medusa_files.is_medusa(base):
        raise CheckpointError(f"{name}, the base model of {heads}, is Medusa heads too")
    return base
