"""From names to a pair: the target, its tokenizer, and what is to draft for it."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from . import threads
from .cache_settings import CacheSettings
from .checkpoints import files, shards, speculators
from .checkpoints.formats import medusa as medusa_files
from .checkpoints.source import as_directory, resolve, resolve_config
from .checkpoints.speculators import mtp
from .checkpoints.speculators.layout import SpeculatorFiles
from .contracts import Progress
from .drafting.translation import Translation
from .drafting.trial import Trial
from .errors import CheckpointError, OptionError, SourceError
from .models import families
from .models import speculators as networks
from .models.base import Base
from .models.loading import Loaded, load_model
from .models.medusa_heads import MedusaHeads, attach
from .models.number_format import NumberFormat
from .models.self_draft import self_draft
from .models.stand_in import stand_in
from .options import SELF
from .pair import Pair
from .ranks.group import Mode, Ranks, join
from .text.tokenizer import Tokenizer, load_tokenizer
from .text.vocabulary import common_size, shared_tokens

T = TypeVar("T")
DRAFT_VOCABS = ("same", "intersect")
SELF_BITS = 4
"""Of the draft "self", unless told otherwise."""


@dataclass(frozen=True)
class Loading:
    """How both models of a pair are loaded; see `load`. ranks: that share the target, its layers
    as a pipeline. fetching: seconds that were spent on having the files here."""

    dtype: str
    caches: CacheSettings | None
    random_weights: bool
    progress: Progress | None
    ranks: Ranks | None = None
    pipeline: bool = False
    fetching: list[float] = field(default_factory=list)

    def together(self, work: Callable[[], T]) -> T:
        """Do something on all ranks, where there are several; see `Ranks.together`."""
        return work() if self.ranks is None else self.ranks.together(work)


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
    float32, float16, bfloat16. q_bits: quantize on load. caches: quantized or cut KV caches; a
    draft that cannot have them keeps its own. draft_vocab: "same" refuses a draft with other
    tokens, "intersect" drafts the tokens that both have. random_weights: for measuring; a model
    without weights here gets random ones, no more than config.json is downloaded, and vocabularies
    are not compared. distributed: the ranks that mlx.launch has started share the target, "tensor"
    each layer and "pipeline" the layers; rank 0 alone gets a pair, and the others serve it until it
    ends, when SystemExit is raised there.
    Raises SourceError, CheckpointError, VocabularyError, OptionError.
    """
    if draft_vocab not in DRAFT_VOCABS:
        raise OptionError(f"draft-vocab must be same or intersect, not {draft_vocab!r}")
    threads.clear_at_end()
    ranks = None if distributed is None else join()
    if distributed is not None:
        _check_divisible(draft_model, random_weights)
    started = time.perf_counter()
    given = Loading(dtype, caches, random_weights, progress, ranks, distributed == "pipeline")
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
    )
    if wanted is not None:
        pair = _with_wanted(pair, target.kind, wanted, draft_q_bits, draft_vocab, given)
    elif heads is None:
        pair = _with_own_layers(pair, directory, NumberFormat(dtype, draft_q_bits))
    return replace(pair, load_seconds=time.perf_counter() - started - sum(given.fetching))


def with_draft_model(
    pair: Pair,
    draft_model: str | Path,
    *,
    dtype: str = "auto",
    draft_q_bits: int | None = None,
    caches: CacheSettings | None = None,
    draft_vocab: str = "same",
    random_weights: bool = False,
    progress: Progress | None = None,
) -> Pair:
    """The same target with another draft; see `load`."""
    given = Loading(dtype, caches, random_weights, progress)
    wanted = _wanted(draft_model, given)
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
    return _with_wanted(alone, kind, wanted, draft_q_bits, draft_vocab, given)


@dataclass(frozen=True)
class Wanted:
    """What is to draft. source: where it is; None for the target's own layers. riding: what reads
    hidden states there."""

    name: str
    source: Path | None
    riding: SpeculatorFiles | None


def _wanted(draft_model: str | Path | None, given: Loading) -> Wanted | None:
    if draft_model is None:
        return None
    name = str(draft_model)
    source = None if name == SELF else _fetch(name, None, given)
    return Wanted(name, source, None if source is None else speculators.read(source))


def _with_wanted(
    pair: Pair, kind: str, wanted: Wanted, q_bits: int | None, draft_vocab: str, given: Loading
) -> Pair:
    """kind: of the target."""
    pair = replace(pair, draft_name=wanted.name)
    if wanted.source is None:
        own, added = self_draft(pair.target, q_bits or SELF_BITS)
        return replace(pair, draft=own, draft_bytes=added)
    if wanted.riding is not None:
        network = networks.attach(wanted.riding, pair.target, NumberFormat(given.dtype, q_bits))
        return replace(pair, speculator=network, draft_bytes=network.nbytes)
    alone = replace(given, ranks=None, pipeline=False)
    loaded, tokenizer = _load_draft(wanted.source, q_bits, alone)
    if loaded.kind != kind:
        raise OptionError(
            f"the draft model is {loaded.kind} and the target {kind}: give a draft of the target's "
            "own kind"
        )
    return _with_draft(pair, loaded.model, tokenizer, draft_vocab, given.random_weights)


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
    wanted = _wanted(draft_model, given)
    directory = _fetch(model, revision, given)
    speculators.check_is_none(directory)
    if wanted is not None and wanted.riding is not None:
        _check_early(wanted.riding, directory)
    return wanted, directory


def _check_early(riding: SpeculatorFiles, target: Path) -> None:
    """Raises CheckpointError before any weights are read, where the target's config.json tells that
    the drafter was made for another target."""
    if (target / "config.json").is_file():
        riding.check_config(files.read_config(target))


def _with_own_layers(pair: Pair, directory: Path, numbers: NumberFormat) -> Pair:
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


def _load_target(
    directory: Path, q_bits: int | None, given: Loading, adapter: Path | None
) -> tuple[Loaded, Tokenizer, MedusaHeads | None]:
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


def _load_draft(directory: Path, q_bits: int | None, given: Loading) -> tuple[Loaded, Tokenizer]:
    try:
        return _load_from(directory, q_bits, given)
    except OptionError:
        # The text is the target's whatever the draft remembers; what is wrong comes again.
        return _load_from(directory, q_bits, replace(given, caches=None))


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
        if given.random_weights and not shards.format_of(directory):
            if adapter is not None:
                raise OptionError(f"{directory} has no weights to adapt: leave adapter-path out")
            return stand_in(directory, dtype=given.dtype, q_bits=q_bits, caches=given.caches)
        loaded = load_model(
            directory,
            dtype=given.dtype,
            q_bits=q_bits,
            caches=given.caches,
            adapter=adapter,
            group=None if given.ranks is None else given.ranks.group,
            pipeline=given.pipeline,
        )
        tokenizer = load_tokenizer(directory, kind=loaded.kind)
        # Files of a chat template are read when it is first asked for.
        weakref.finalize(tokenizer, held.pop_all().close)
    return loaded, tokenizer
