"""Which other programs can run a pair, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..assemble import Pair
from ..options import Options
from .hugging_face import HuggingFace, NoBaselineError, hugging_face
from .methods import Length, Method
from .mlx_lm_baseline import mlx_lm_methods
from .transformers_baseline import transformers_methods


@dataclass(frozen=True)
class Baselines:
    """notes: one sentence on each program, what it ran on or why it did not."""

    methods: tuple[Method, ...] = ()
    notes: tuple[str, ...] = ()


def find_baselines(
    pair: Pair,
    options: Options,
    lengths: Sequence[Length],
    installed: Callable[[], HuggingFace] = hugging_face,
) -> Baselines:
    """All that can run these models here. installed: raises NoBaselineError where torch is not."""
    ours = mlx_lm_methods(pair, options, lengths)
    notes = [] if ours else ["mlx-lm is left out: it has no model of this kind"]
    try:
        hugging = installed()
        theirs = transformers_methods(pair, options, lengths, hugging)
    except NoBaselineError as problem:
        return Baselines(tuple(ours), (*notes, f"transformers is left out: {problem}"))
    return Baselines((*ours, *theirs), (*notes, hugging.describe()))
