"""Load a pair by the names of its models. A pair is a target with its tokenizer and drafters."""

import operator
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from .. import system
from ..checkpoints import files
from ..checkpoints.source import as_directory, check, resolve
from ..core.options import Options, mtp_of
from ..errors import CheckpointError, OptionError, SourceError, check_one_of
from ..models.cache_settings import CacheSettings
from ..models.distributed.group import Mode, join
from ..models.drafters import kinds, medusa, mtp, mtp_layers
from ..models.drafters.files import DrafterFiles
from ..models.drafters.medusa import MedusaFiles
from ..models.encoder_decoder.context import share_equal_encoder
from ..models.loading import Loaded, family_of_network, load_model
from ..models.number_format import NumberFormat
from ..text.tokenizer import Tokenizer, load_tokenizer
from ..text.vocabulary import Translation, common_size, shared_tokens
from ..types import Progress
from .pair import Pair


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
    distributed: Mode | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Pair:
    """Load a target and its drafter.

    Without a draft model, the drafter is the multi-token-prediction layers of the target's
    checkpoint, or else n-gram lookup in the prompt and the completion.

    Args:
        model: The target: a directory, a GGUF file, or a name on the Hugging Face Hub. If it names
            Medusa heads, their base model is the target.
        draft_model: A draft model, or a drafter that reads the target's hidden states. "mtp" means
            the target's layers for multi-token prediction; if its checkpoint lacks them, they are
            downloaded from the model that it was converted from. "mtp:OWNER/NAME" names the
            repository of that model.
        revision: The branch, tag or commit of the target on the Hub; None for main.
        adapter_path: A directory with an adapter that mlx-lm has trained for the target.
        dtype: "auto", "float32", "float16" or "bfloat16". "auto" computes in float32 on the CPU,
            and elsewhere in the dtype of the checkpoint.
        q_bits: Quantize the target to this many bits on load.
        draft_q_bits: Quantize the draft to this many bits on load.
        expand_weights: Whether to dequantize the weights of a quantized model on load. None does so
            on a CPU if the weights then take less than a quarter of the memory.
        caches: The settings of the KV cache. A draft model without support keeps its own.
        draft_vocab: "same" refuses a draft model with other tokens, and "intersect" drafts the
            tokens that both models have.
        distributed: How the ranks that mlx.launch has started share the target: "tensor" divides
            each layer, and "pipeline" the list of layers. Only rank 0 returns a pair. All other
            ranks serve rank 0 until it ends, and then raise SystemExit.
        progress: Called with the numbers of bytes of a download that are done and that there are.
        announce: Called with a line about the size of a download that the name "mtp" leads to.

    Returns:
        The pair, which many completions share.

    Raises:
        SourceError: A name is no local model and cannot be downloaded.
        CheckpointError: Files are damaged, or of a kind that is not supported.
        VocabularyError: The draft model has other tokens.
        OptionError: The settings do not suit the models.

    Example:
        pair = load("mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-0.6B-4bit")
    """
    check_one_of("draft-vocab", draft_vocab, ("same", "intersect"))
    system.clear_at_end()
    ranks = None if distributed is None else join()
    system.warn_if_late()
    loader = Loader(dtype, expand_weights, caches, progress, announce)
    adapter = None if adapter_path is None else Path(adapter_path)
    named = draft_model if ranks is None or not ranks.rank else None  # rank 0 alone drafts
    together = operator.call if ranks is None else ranks.together
    source, directory, heads_files = together(partial(loader.find, str(model), revision, named))
    started = time.perf_counter()
    read = partial(loader.read, directory, q_bits=q_bits, adapter=adapter)
    if ranks is not None:
        ranks.meet(directory)
        read = partial(read, group=ranks.group, pipeline=distributed == "pipeline")
    target, tokenizer = together(read)
    attach = None if heads_files is None else partial(medusa.attach, heads_files, target.model)
    heads = None if attach is None else together(attach)
    network, note = target.model.network, ""
    if caches is not None and caches.bits is not None:
        note = (
            f"the KV cache is quantized to {caches.bits} bits, which amplifies rounding: outputs "
            "with drafts can differ from plain decoding's; leave kv-bits out, or take "
            "--regular-decode"
        )
    if ranks is not None:
        target = replace(target, model=ranks.share(target.model))
    pair = Pair(
        name=str(model),
        draft_name=None if source is None else str(draft_model),
        target=target.model,
        draft=None,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(target.eos_token_ids or tokenizer.eos_token_ids),
        vocabulary=min(target.model.vocabulary, tokenizer.size),
        dtype=target.dtype,
        load_seconds=0.0,
        heads=heads,
        task_prefix=target.task_prefix,
        languages=family_of_network(network).languages(network, tokenizer),
        notes=tuple(filter(None, (target.note, note))),
        sampling=_usable(target.sampling),
    )
    if source is not None:
        pair = loader.with_draft(pair, source, draft_q_bits, draft_vocab)
    elif heads is None:
        pair = _with_mtp_layers(pair, directory, loader.numbers(draft_q_bits))
    return replace(pair, load_seconds=time.perf_counter() - started)


def with_draft_model(
    pair: Pair,
    draft_model: str | Path,
    *,
    draft_q_bits: int | None = None,
    draft_vocab: str = "same",
    **loading: Any,
) -> Pair:
    """Return a pair of the same target with another draft model; see `load`. The other keyword
    arguments are the fields of `Loader`."""
    loader = Loader(**loading)
    size = min(pair.target.vocabulary, pair.tokenizer.size)
    alone = replace(pair, draft=None, drafter_network=None, translation=None, vocabulary=size)
    alone = replace(alone, draft_name=str(draft_model), judged=set())
    source = loader.find_draft(draft_model, pair.name, None)
    return loader.with_draft(alone, source, draft_q_bits, draft_vocab)


DraftSource = DrafterFiles | Path
"""The files of a drafter that reads hidden states, or the directory of a draft model."""


@dataclass(frozen=True)
class Loader:
    """A loader of the models of a pair with the settings of `load`."""

    dtype: str = "auto"
    expand_weights: bool | None = None
    caches: CacheSettings | None = None
    progress: Progress | None = None
    announce: Callable[[str], None] = lambda line: None

    def numbers(self, q_bits: int | None) -> NumberFormat:
        return NumberFormat(self.dtype, q_bits, expand=self.expand_weights)

    def find(
        self, model: str, revision: str | None, draft_model: str | Path | None
    ) -> tuple[DraftSource | None, Path, MedusaFiles | None]:
        """Return the source of the draft, the directory of the target, and Medusa heads if `model`
        names them, downloading all."""
        try:
            source = None if draft_model is None else self.find_draft(draft_model, model, revision)
        except SourceError:
            # If the target is missing as well, its error is raised: the user needs it first.
            check(model, revision=revision)
            raise
        directory, heads = self._fetch(model, revision), None
        kinds.check_is_none(directory)
        if medusa.is_medusa(directory):
            heads = medusa.read(directory)
            directory = self._base(directory, heads.base)
        described = (directory / "config.json").is_file()
        if described and isinstance(source, DrafterFiles):
            source.check_config(files.read_config(directory))
        return source, directory, heads

    def find_draft(self, draft_model: str | Path, model: str, revision: str | None) -> DraftSource:
        """Return the source of the draft for the target `model`. Layers for multi-token prediction
        come from the repository that `draft_model` names, or else from the target or the model that
        it was converted from."""
        if (original := mtp_of(draft_model)) is None:
            directory = self._fetch(str(draft_model), None)
        else:
            target = self._fetch(model, revision)
            if not original:
                own = mtp.of_target(target, files.read_config(target))
                if own is not None:
                    return own
                original = mtp_layers.original_of(model, target, revision)
            report = self.progress or (lambda done, total: None)
            directory = mtp_layers.fetch(original, self.announce, report)
        return kinds.read(directory) or directory

    def with_draft(
        self, pair: Pair, source: DraftSource, q_bits: int | None, draft_vocab: str
    ) -> Pair:
        """Return the pair with a draft. Raises the errors of `load`."""
        if isinstance(source, DrafterFiles):
            network = kinds.attach(source, pair.target, self.numbers(q_bits))
            return replace(pair, drafter_network=network, draft_bytes=network.nbytes)
        try:
            loaded, tokenizer = self.read(source, q_bits=q_bits)
        except OptionError:
            # The draft may not support these caches. Any other error is raised again.
            loaded, tokenizer = replace(self, caches=None).read(source, q_bits=q_bits)
        kind, wanted = loaded.model.kind, pair.target.kind
        if kind != wanted:
            kinds_differ = f"the draft model is {kind} and the target {wanted}"
            raise OptionError(f"{kinds_differ}: give a draft of the target's own kind")
        draft = loaded.model
        notes = (*pair.notes, loaded.note) if loaded.note else pair.notes
        added = draft.nbytes
        if share_equal_encoder(draft, pair.target):
            of_target = {id(array) for _, array in tree_flatten(pair.target.network.parameters())}
            own = tree_flatten(draft.network.parameters())
            added = sum(array.nbytes for _, array in own if id(array) not in of_target)
        pair = replace(pair, notes=notes, draft=draft, draft_bytes=added)
        widths = pair.target.vocabulary, draft.vocabulary
        if draft_vocab == "intersect":
            shared = shared_tokens(pair.tokenizer, tokenizer, *widths)
            return replace(pair, translation=Translation(*shared))
        return replace(pair, vocabulary=common_size(pair.tokenizer, tokenizer, *widths))

    def _fetch(self, name: str, revision: str | None) -> Path:
        return resolve(name, revision=revision, progress=self.progress)

    def _base(self, heads: Path, name: str) -> Path:
        """Return the base model of Medusa heads: a subdirectory of `heads`, or a model by name."""
        inside = heads / name
        try:
            base = inside if inside.is_dir() else self._fetch(name, None)
        except SourceError as problem:
            raise SourceError(f"{heads} names a base model that is missing: {problem}") from problem
        if medusa.is_medusa(base):
            raise CheckpointError(f"{name}, the base model of {heads}, is Medusa heads too")
        return base

    def read(self, source: Path, **settings: Any) -> tuple[Loaded, Tokenizer]:
        """Return a model and its tokenizer. settings: More arguments of `load_model`."""
        with ExitStack() as opened:
            directory = opened.enter_context(as_directory(source))
            settings |= {"expand": self.expand_weights, "caches": self.caches}
            loaded = load_model(directory, dtype=self.dtype, **settings)
            tokenizer = load_tokenizer(directory, kind=loaded.model.kind)
            # Keep the directory, since the chat template's files are read at its first use.
            weakref.finalize(tokenizer, opened.pop_all().close)
        return loaded, tokenizer


def _usable(sampling: Mapping[str, object]) -> dict[str, float]:
    """Return the sampling settings that Options accepts. Invalid values of a file are ignored."""
    usable: dict[str, float] = {}
    for name, value in sampling.items():
        with suppress(OptionError):
            usable[name] = getattr(Options(**{name: value}), name)  # type: ignore[arg-type]
    return usable


def _with_mtp_layers(pair: Pair, directory: Path, numbers: NumberFormat) -> Pair:
    """Return the pair with the layers for multi-token prediction in the target's checkpoint."""
    if not (directory / "config.json").is_file():
        return pair
    try:
        layers = mtp.of_target(directory, files.read_config(directory))
        if layers is None:
            return pair
        network = kinds.attach(layers, pair.target, numbers)
    except (CheckpointError, OptionError) as problem:
        return replace(pair, unusable={"mtp": str(problem)})
    return replace(pair, drafter_network=network, draft_bytes=network.nbytes)
