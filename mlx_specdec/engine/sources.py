"""How the models of a pair are fetched and read."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..checkpoints import files, shards
from ..checkpoints.source import as_directory, resolve, resolve_config
from ..errors import OptionError
from ..interfaces import Progress
from ..models.cache_settings import CacheSettings
from ..models.distributed.group import Ranks
from ..models.loading import Loaded, load_model, outline
from ..models.number_format import NumberFormat
from ..text.tokenizer import StandInTokenizer, Tokenizer, load_tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Loading:
    """How both models of a pair are loaded; see `load`, whose expand_weights is `expand`. ranks:
    that share the target, its layers as a pipeline. fetching: seconds that were spent on having
    the files here."""

    dtype: str
    expand: bool | None
    caches: CacheSettings | None
    random_weights: bool
    progress: Progress | None
    ranks: Ranks | None = None
    pipeline: bool = False
    fetching: list[float] = field(default_factory=list)

    def numbers(self, q_bits: int | None) -> NumberFormat:
        """Of a model that is quantized to q_bits on load."""
        return NumberFormat(self.dtype, q_bits, expand=self.expand)

    def together(self, work: Callable[[], T]) -> T:
        """Do something on all ranks, where there are several; see `Ranks.together`."""
        return work() if self.ranks is None else self.ranks.together(work)

    def fetch(self, name: str, revision: str | None) -> Path:
        """As `resolve` says; of the Hub no more than config.json where weights are random."""
        started = time.perf_counter()
        try:
            if self.random_weights:
                return resolve_config(name, revision=revision)
            return resolve(name, revision=revision, progress=self.progress)
        finally:
            self.fetching.append(time.perf_counter() - started)

    def load(
        self, source: Path, q_bits: int | None, adapter: Path | None = None
    ) -> tuple[Loaded, Tokenizer]:
        """A model and its tokenizer."""
        with ExitStack() as held:
            directory = held.enter_context(as_directory(source))
            if self.random_weights and not shards.format_of(directory):
                if adapter is not None:
                    raise OptionError(
                        f"{directory} has no weights to adapt: leave adapter-path out"
                    )
                return _stand_in(directory, dtype=self.dtype, q_bits=q_bits, caches=self.caches)
            loaded = load_model(
                directory,
                dtype=self.dtype,
                q_bits=q_bits,
                expand=self.expand,
                caches=self.caches,
                adapter=adapter,
                group=None if self.ranks is None else self.ranks.group,
                pipeline=self.pipeline,
            )
            tokenizer = load_tokenizer(directory, kind=loaded.kind)
            # Files of a chat template are read when it is first asked for.
            weakref.finalize(tokenizer, held.pop_all().close)
        return loaded, tokenizer


def _stand_in(
    directory: Path, *, dtype: str, q_bits: int | None, caches: CacheSettings | None
) -> tuple[Loaded, StandInTokenizer]:
    """The model that a directory's config.json describes, and ids for text; see `load_model`.

    Raises OptionError for caches other than the model's own.
    """
    if caches is not None and caches != CacheSettings():
        raise OptionError(
            f"{directory} has no weights, and a model with random ones keeps its own caches: leave "
            "kv-bits and max-kv-size out"
        )
    config = files.read_config(directory)
    known = outline(config, str(directory), dtype=dtype, q_bits=q_bits)
    return Loaded(known.model(), (), known.kind, known.dtype), StandInTokenizer(known.vocabulary)
