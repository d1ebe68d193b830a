"""What a draft's training begins with: an existing draft, or a smaller copy of the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..assemble import Pair
from ..checkpoints import files
from ..checkpoints.source import as_directory, resolve
from ..errors import OptionError, VocabularyError
from ..models.base import Base
from ..models.shaped import shaped
from ..options import SELF
from .config import DraftConfig


@dataclass(frozen=True)
class Initial:
    """model: before its first step. config: its config.json. directory: where its tokenizer files
    are. origin: in words, where it comes from."""

    model: Base
    config: Mapping[str, Any]
    directory: Path
    origin: str


@contextmanager
def initial(pair: Pair, asked: DraftConfig | None, seed: int) -> Iterator[Initial]:
    """The pair's own draft, or a model as asked for; its files are there during the block.

    Raises OptionError for neither or both and for a target that is heads, VocabularyError for a
    draft that lacks tokens of the target, CheckpointError as loading does.
    """
    if pair.heads is not None:
        raise OptionError(f"{pair.name} is Medusa heads: give the base model that they name")
    if (pair.draft is None) == (asked is None):
        raise OptionError("give either a draft model to begin with or the number of its layers")
    if pair.draft_name == SELF:
        raise OptionError("the draft self has no weights of its own: give layers instead")
    if pair.draft is not None and (pair.translation or pair.draft.vocabulary < pair.vocabulary):
        raise VocabularyError(
            f"{pair.draft_name} knows {pair.draft.vocabulary} of the target's {pair.vocabulary} "
            "tokens, and a draft learns to predict all of them: take another, or give layers"
        )
    with as_directory(resolve(pair.draft_name or pair.name)) as directory:
        config = files.read_config(directory)
        name = short_name(pair.draft_name or pair.name)
        if pair.draft is not None:
            yield Initial(pair.draft, config, directory, name)
        elif asked is not None:
            model, changed = shaped(pair.target, config, asked.layers, asked.width, seed)
            layers = f"{asked.layers} layer{'' if asked.layers == 1 else 's'}"
            width = "" if asked.width is None else f", {asked.width} wide, random weights"
            yield Initial(model, changed, directory, f"{layers} of {name}{width}")


def short_name(model: str) -> str:
    """A directory's own name, a Hub name as it is."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
