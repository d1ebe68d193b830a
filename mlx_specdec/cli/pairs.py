"""The models that a command was asked for, or the shipped ones.

Knows where the shipped weights lie. MLX is imported when models are loaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from . import render
from .groups import Models, Sources
from .known_pairs import AUTO, draft_for

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..cache_settings import CacheSettings

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_TARGET = "weights/t5-enfr"
SHIPPED_DRAFT = "weights/t5-enfr-draft"
SHIPPED_PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)
SAMPLES = {"t5-enfr": "translation.jsonl", "py-llama": "python.jsonl"}
"""Prompt files of the shipped targets, by the name of their directory; their heads' too."""
NOT_SHIPPED = (
    "the sample models come with a clone of the repository only: name a pair, such as --model "
    "google/flan-t5-large --draft-model google/flan-t5-small; mlx-specdec pairs lists more"
)


def named(sources: Sources) -> tuple[str, str | None]:
    """Target and draft as named; where no target is, the shipped ones. Raises OptionError where the
    shipped ones are not there, and for a draft "auto" of an unknown target."""
    target = sources.model or SHIPPED_TARGET
    if sources.model is None and not any((place / target).is_dir() for place in (Path(), ROOT)):
        raise OptionError(NOT_SHIPPED)
    if sources.draft_model == AUTO:
        return target, draft_for(target)
    return target, sources.draft_model or (SHIPPED_DRAFT if sources.model is None else None)


def load_pair(
    model: str, draft_model: str | None = None, *, told: bool = True, **settings: Any
) -> Pair:
    """Load what was named, with a progress bar of a download; takes settings and raises as
    assemble.load does. told: say how the weights of large models are computed with."""
    from .. import blas

    blas.load()
    from ..assemble import load

    with render.progress("downloading", in_bytes=True) as report:
        pair = load(model, draft_model, progress=report, **settings)
    for note in pair.notes if told else ():
        render.tell(note)
    return pair


def meet(models: Models, caches: CacheSettings | None) -> None:
    """Meet the ranks that share the target. Returns on rank 0; the others end with it."""
    from .. import blas

    blas.load()
    from ..ranks.group import join

    ranks = join(models.status_file)
    # Rank 0 alone needs a draft, and says whatever is wrong.
    target, _ = ranks.together(lambda: named(replace(models, draft_model=None)))
    if ranks.rank:
        load_pair(target, told=False, caches=caches, **models.loading())


def sample(model: str) -> Path:
    """The prompts for a target that comes with the repository; OptionError for any other."""
    name = SAMPLES.get(Path(model).name.removesuffix("-medusa"))
    if name is None or not (ROOT / "prompts" / name).is_file():
        raise OptionError("no prompts: name a file with one prompt a line")
    return ROOT / "prompts" / name


def check_for_translator(file: Path) -> None:
    """Raises OptionError for the repository's prompts of another target."""
    of_translator = SAMPLES[Path(SHIPPED_TARGET).name]
    if file.resolve().parent == ROOT / "prompts" and file.name != of_translator:
        raise OptionError(
            f"{file} is not for the translator, which is measured without --model: name the "
            "target, for example --model weights/py-llama"
        )
