"""A model with random weights in the place of one whose weights are not here, for measuring.

Knows outlines and a directory's config.json. Nothing that such a model writes means anything.
"""

from __future__ import annotations

from pathlib import Path

from ..cache_settings import CacheSettings
from ..checkpoints import files
from ..errors import OptionError
from ..text.stand_in import StandInTokenizer
from .loading import Loaded
from .outline import outline


def stand_in(
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
