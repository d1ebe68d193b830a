"""What a draft's training begins with: a draft that is there, or a shape cut out of the target.

Knows directories of models, and what a draft must share with its target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..assemble import Pair
from ..checkpoints import files
from ..checkpoints.layouts import as_directory
from ..checkpoints.source import resolve
from ..errors import OptionError, VocabularyError
from ..models.base import Base
from ..models.shaped import shaped
from ..options import SELF
from .settings import Shape


@dataclass(frozen=True)
class Beginning:
    """model: as it begins. config: the config.json that goes with it. directory: whose tokenizer
    files it needs. words: where it comes from."""

    model: Base
    config: Mapping[str, Any]
    directory: Path
    words: str


@contextmanager
def begin(pair: Pair, shape: Shape | None, seed: int) -> Iterator[Beginning]:
    """The pair's own draft, or a model of this shape; its files are there during the block.

    Raises OptionError for neither or both and for a target that is heads, VocabularyError for a
    draft that lacks tokens of the target, CheckpointError as loading does.
    """
    if pair.heads is not None:
        raise OptionError(f"{pair.name} is Medusa heads: give the base model that they name")
    if pair.draft is None and shape is not None:
        with as_directory(resolve(pair.name)) as directory:
            yield _cut(pair, shape, directory, seed)
        return
    if pair.draft is None or shape is not None:
        raise OptionError("give either a draft model to begin with or the number of its layers")
    if pair.draft_name == SELF:
        raise OptionError("the draft self has no weights of its own: give layers instead")
    if pair.translation is not None or pair.draft.vocabulary < pair.vocabulary:
        raise VocabularyError(
            f"{pair.draft_name} knows {pair.draft.vocabulary} of the target's {pair.vocabulary} "
            "tokens, and a draft learns to predict all of them: take another, or give layers"
        )
    with as_directory(resolve(str(pair.draft_name))) as directory:
        config = files.read_config(directory)
        yield Beginning(pair.draft, config, directory, name_of(str(pair.draft_name)))


def _cut(pair: Pair, shape: Shape, directory: Path, seed: int) -> Beginning:
    config = files.read_config(directory)
    model, changed = shaped(pair.target, config, shape.layers, shape.width, seed)
    layers = f"{shape.layers} layer{'' if shape.layers == 1 else 's'}"
    width = "" if shape.width is None else f", {shape.width} wide, random weights"
    return Beginning(model, changed, directory, f"{layers} of {name_of(pair.name)}{width}")


def name_of(model: str) -> str:
    """A directory's own name, a Hub name as it is."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
