"""The figures of a benchmark as a table in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from . import render

if TYPE_CHECKING:
    from rich.table import Table

    from ..measure.setting import Setting
    from ..measure.table import Measured
    from ..measure.table import Table as Told
from dataclasses import replace
from typing import TYPE_CHECKING

from .groups import Models

if TYPE_CHECKING:
    from ..engine.generate import Pair
    from ..measure.analysis import Analysis
    from ..measure.cluster import LinkTimer
    from ..measure.estimate_result import Cluster
    from ..measure.methods import Length
from functools import partial

from ..errors import OptionError
from ..options import Options

if TYPE_CHECKING:
    from ..engine.generate import Pair
    from ..measure.methods import Length
    from ..measure.throughput import Throughput
    from ..text.prompts import Prompt
    from .bench import Measuring


DISPENSABLE = (
    "predicted",
    "median sequence",
    "texts/s",
    "acceptance length",
    "95 % interval",
    "acceptance rate",
    "peak memory",
    "same text",
)
"""Columns that a narrow terminal does without, the first one first."""


def show(analysis: Measured, setting: Setting, stream: TextIO) -> None:
    """Write the table. Raises as render.write does."""
    from ..measure.analysis import Analysis
    from ..measure.table import cluster_table, cluster_text, table, verdict

    console, told = render.console_for(stream), table(analysis)
    shown, anywhere = list(told.columns), console.options.update(width=1000)
    dispensable = [name for name in DISPENSABLE if name in shown]
    laid = _table(told, shown)
    while console.measure(laid, options=anywhere).maximum > console.width and dispensable:
        shown.remove(dispensable.pop(0))
        laid = _table(told, shown)
    notes = (text for text in (_caption(analysis), verdict(analysis), *setting.notes) if text)
    shared: list[object] = []
    if isinstance(analysis, Analysis) and analysis.cluster is not None:
        gains = cluster_table(analysis.cluster)
        text = cluster_text(analysis.cluster, analysis.plain_step)
        shared = [text, _table(gains, gains.columns)]
    render.write(stream, render.laid_out(stream, _title(setting), laid, *notes, *shared))


def differences(analysis: Measured) -> Iterator[str]:
    """One line for every method whose texts were not what they had to be."""
    for one in analysis.methods:
        if one.differences:
            margins = [each.margin for each in one.differences if each.margin is not None]
            least = f", least margin {min(margins):.2g}" if margins else ""
            yield (
                f"{one.name}: {len(one.differences)} of {one.compared} texts are not plain "
                f"decoding's own{least}"
            )


def _table(told: Told, columns: Sequence[str]) -> Table:
    """With no cell cut; headings of two words take two lines."""
    places = [told.columns.index(name) for name in columns]
    names = [name.replace(" ", "\n") for name in columns]
    table = render.table(*(f">{name}" if at else name for at, name in enumerate(names)))
    for numbers in table.columns[1:]:
        numbers.no_wrap = True
    for number, row in enumerate(told.rows):
        style = "bold" if number == told.best else None
        table.add_row(*(row[at] for at in places), style=style)
    return table


def _title(setting: Setting) -> str:
    draft = f" with {setting.draft_model}" if setting.draft_model else ""
    share = setting.simulated_acceptance
    simulated = "" if share is None else f"simulated acceptance probability {share:g}, no text; "
    return (
        f"{setting.model}{draft}, {setting.dtype}, temperature {setting.temperature:g}; {simulated}"
        f"{setting.device}, BLAS {setting.blas}"
    )


def _caption(analysis: Measured) -> str:
    skipped = f"; {len(analysis.skipped)} skipped" if analysis.skipped else ""
    interrupted = "; interrupted" if analysis.interrupted else ""
    return (
        f"{analysis.texts} texts, each up to {analysis.repeats} times, methods in turns{skipped}"
        f"{interrupted}"
    )


class Together:
    """The machines of a target that is shared, and the network between them.

    model: the target as it was named. lengths: numbers of drafted tokens that are measured. Raises
    CheckpointError where config.json does not tell how often machines exchange something.
    """

    def __init__(self, pair: Pair, model: str, models: Models, lengths: Sequence[Length]) -> None:
        from ..measure.cluster import LinkTimer
        from ..models.distributed.group import join

        ranks = join()
        self._cluster = _cluster(model, models, ranks.size)
        sizes = [1, *(length + 1 for length in lengths if length != "auto")]
        self._timer: LinkTimer = LinkTimer(ranks, pair.target, sizes, self._cluster.exchanges)

    def turn(self, times: int) -> None:
        """Time sums over the machines; between texts, so that both see the same network."""
        self._timer.turn(times)

    def told(self, analysis: Analysis) -> Analysis:
        """With what was found out."""
        from ..measure.analysis import of_cluster

        seconds, known = self._timer.seconds(), self._cluster
        if not seconds:
            return analysis
        figures = of_cluster(
            analysis,
            seconds,
            machines=known.machines,
            mode=known.mode,
            exchanges=known.exchanges,
            share=known.share,
        )
        return replace(analysis, cluster=figures)


def _cluster(model: str, models: Models, machines: int) -> Cluster:
    """How many exchanges a pass has, and how much of it is each machine's own."""
    from ..checkpoints.files import read_config
    from ..checkpoints.source import resolve_config
    from ..measure.cluster import Link, cluster
    from ..measure.estimate import Asked

    config = read_config(resolve_config(model, revision=models.revision))
    known = Asked(model, config, models.dtype, models.q_bits).outline()
    return cluster(Link(machines, 0.0, models.distributed == "pipeline"), known, 0)


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
    from ..measure.throughput import encoded, file_methods, measure_files

    sizes = batch_sizes(measuring.batch_size)
    ids, skipped = encoded(pair, prompts, options)
    proposer = next(iter(proposers), None)
    methods, notes = file_methods(pair, options, proposer, length, sizes)
    if measuring.baselines:
        from ..measure.baselines import find_baselines, mlx_lm_file_methods
        from ..measure.transformers_baseline import transformers_file_methods

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
