"""The models that a command was asked for, or the shipped ones.

Knows where the shipped weights lie. MLX is imported when models are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache_settings import CacheSettings
from . import render

if TYPE_CHECKING:
    from ..assemble import Pair

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_TARGET = "weights/t5-enfr"
SHIPPED_DRAFT = "weights/t5-enfr-draft"
SHIPPED_PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)


def shipped(name: str) -> str:
    """A relative directory that is not here but beside the program is meant there."""
    if not Path(name).exists() and (ROOT / name).is_dir():
        return str(ROOT / name)
    return name


def load_pair(
    model: str,
    draft_model: str | None,
    *,
    dtype: str,
    q_bits: int | None = None,
    draft_q_bits: int | None = None,
    caches: CacheSettings | None = None,
    draft_vocab: str = "same",
    random_weights: bool = False,
) -> Pair:
    """Load what was named, with a progress bar of a download; raises as assemble.load does."""
    from .. import blas

    blas.load()
    from ..assemble import load

    with render.progress("downloading", in_bytes=True) as report:
        return load(
            shipped(model),
            None if draft_model is None else shipped(draft_model),
            dtype=dtype,
            q_bits=q_bits,
            draft_q_bits=draft_q_bits,
            caches=caches,
            draft_vocab=draft_vocab,
            random_weights=random_weights,
            progress=report,
        )


def search_in(pair: Pair, files: Sequence[Path]) -> Pair:
    """The pair with documents for lookup, with a progress bar; raises as with_documents does."""
    from ..assemble import with_documents

    with render.progress("indexing what to look up") as report:
        return with_documents(pair, files, progress=report)
