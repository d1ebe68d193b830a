"""The throughput of a whole file: what bench measures with --batch-size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import OptionError
from ..options import Options
from . import render

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..bench.methods import Length
    from ..bench.throughput import Throughput
    from ..text.prompts import Prompt
    from .bench import Measuring


def batch_sizes(text: str | None) -> list[int]:
    """What --batch-size names; none where it is left out. Raises OptionError."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    for word in words:
        if not is_count(word):
            raise OptionError(f"batch-size must look like 1,4,16; {word!r} is no batch size")
    return sorted(set(map(int, words)))


def is_count(word: str) -> bool:
    """Whether it is a number from 1 on."""
    return word.isascii() and word.isdigit() and int(word) > 0


def check_one_method(
    options: Options, proposers: Sequence[str], lengths: Sequence[Length], drafts: Sequence[str]
) -> None:
    """Raises OptionError where what speculates is not one method for many texts."""
    if options.simulated_acceptance is not None:
        raise OptionError("simulate-acceptance measures one text: leave it out or --batch-size")
    if len(lengths) > 1:
        raise OptionError("with --batch-size, name one length in --num-draft")
    if len(proposers) > 1:
        raise OptionError("with --batch-size, name one --proposer")
    if len(drafts) > 1:
        raise OptionError("with --batch-size, name one --draft-model")


def measure_throughput(
    pair: Pair,
    options: Options,
    prompts: Sequence[Prompt],
    proposers: Sequence[str],
    length: Length,
    measuring: Measuring,
) -> tuple[Throughput, list[str]]:
    """All figures and sentences on what could not be measured so. Raises KeyboardInterrupt where
    there are none yet."""
    from ..bench.throughput import encoded, file_methods, measure_files

    sizes = batch_sizes(measuring.batch_size)
    ids, skipped = encoded(pair, prompts, options)
    proposer = next(iter(proposers), None)
    methods, notes = file_methods(pair, options, proposer, length, sizes)
    if measuring.baselines:
        from ..bench.baselines import find_baselines, mlx_lm_file_methods
        from ..bench.transformers_baseline import transformers_file_methods

        others, more = find_baselines(
            partial(mlx_lm_file_methods, pair, options, sizes),
            partial(transformers_file_methods, pair, options, sizes),
        )
        methods, notes = [*methods, *others], [*notes, *more]
    with render.progress("measuring") as bar:
        throughput = measure_files(
            ids,
            methods,
            skipped=skipped,
            repeats=measuring.repeats,
            warmup=measuring.warmup,
            progress=bar,
        )
    if throughput is None:
        raise KeyboardInterrupt
    return throughput, notes
