"""The bench command: measure a pair with a file of prompts, and show a table, JSON or a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from ..checkpoints.disk import check_not_read
from ..errors import OptionError
from ..options import Options, proposers
from . import interrupts, render
from .flags import (
    ChatTemplate,
    CostCache,
    Flags,
    Json,
    RuleFlags,
    SamplingFlags,
    command,
    flag,
    group,
)
from .loading import Models, load_pair, named, sample

if TYPE_CHECKING:
    from rich.table import Table

    from ..engine.pair import Pair
    from ..measure.analysis import Analysis
    from ..measure.methods import Length
    from ..measure.presentation import Table as Cells
    from ..measure.report import Measured, Setting
    from ..measure.throughput import Throughput
    from ..text.prompts import Prompt

LENGTHS = "1,2,3,5,8,auto"
ROUNDING = (
    "In half precision a GPU sums one row and several rows in different orders, so outputs can "
    "part where two tokens tie: that is no error, and --exact prevents it (docs/platforms.md)."
)
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
"""Columns that are left out on a narrow terminal, in this order."""


@group("Measuring")
class Measuring(Flags):
    prompts: Path | None = flag(
        None,
        'A file with one prompt a line, or JSON lines with "prompt" or "turns" and "category".',
        argument=True,
        metavar="PROMPTS",
    )
    proposer: list[str] | None = flag(
        None,
        "A drafter to measure, as generate names them; the flag may be repeated.",
        metavar="NAME",
        autocompletion=proposers,
    )
    num_draft: str | None = flag(
        None,
        "The draft lengths to measure, separated by commas; with --batch-size one.",
        "--num-draft-tokens",
        metavar="N,...,auto",
        show_default=f"{LENGTHS}; with --batch-size auto",
    )
    batch_size: str | None = flag(
        None,
        "Measure the throughput over the whole file, so many texts at a time: numbers separated "
        "by commas.",
        metavar="N,...",
    )
    baselines: bool = flag(
        False, "Measure mlx-lm as well, and transformers where torch is installed.", "--peers"
    )
    limit: int | None = flag(None, "The number of prompts to use, from the first one on.", min=1)
    repeats: int = flag(3, "The number of times that each text is generated.", min=1)
    report: Path | None = flag(None, "The HTML file to write plots to.", metavar="FILE")

    @property
    def names(self) -> list[str]:
        """The drafters without repetitions."""
        return list(dict.fromkeys(self.proposer or []))

    def sizes(self) -> list[int]:
        """Return the batch sizes, or an empty list if single completions are measured. Raises
        OptionError if --batch-size is wrong."""
        if self.batch_size is None:
            return []
        return sorted({_count(word, "batch-size", "1,4,16") for word in self.batch_size.split(",")})

    def lengths(self) -> list[Length]:
        """Return the draft lengths. Raises OptionError if --num-draft is wrong."""
        lengths: dict[Length, None] = {}
        text = self.num_draft or (LENGTHS if self.batch_size is None else "auto")
        for word in map(str.strip, text.split(",")):
            count: Length = "auto" if word == "auto" else _count(word, "num-draft", "1,3,8,auto")
            lengths[Options(num_draft=count).num_draft] = None
        return list(lengths)


def _count(word: str, name: str, like: str) -> int:
    """Parse a number of a list. name, like: The flag and an example, for OptionError."""
    if word.strip().isdecimal() and int(word) > 0:
        return int(word)
    raise OptionError(f"{name} must look like {like}; {word.strip()!r} is no number above 0")


@group()
class BenchFlags(CostCache, ChatTemplate, SamplingFlags, RuleFlags):
    """Flags that change the completions."""


@group()
class Compared(Models):
    """Flags for a target and one or several draft models."""

    draft_model: list[str] | None = flag(  # type: ignore[assignment]
        None,
        "A draft as generate takes it; the flag may be repeated, to compare several.",
        "--draft-model-name",
    )

    def begin(self) -> Self:
        first = super().begin()
        draft = first.draft_model
        return replace(first, draft_model=[draft] if isinstance(draft, str) else draft)


@command(
    "mlx-specdec bench prompts/translation.jsonl --limit 10 --report report.html",
    "mlx-specdec bench PROMPTS --model A --draft-model B --draft-model C",
    "mlx-specdec bench --batch-size 1,4,16",
)
def bench(measuring: Measuring, models: Compared, text: BenchFlags, output: Json) -> None:
    """Measure what speculation gains on this machine.

    Without arguments, the shipped translator is measured on its sample prompts. Ctrl-C keeps what
    was measured so far."""
    options = Options(**text.for_options())
    if measuring.baselines and models.adapter_path is not None:
        raise OptionError("baselines take no adapters: leave out --adapter-path or --baselines")
    sizes, lengths = measuring.sizes(), measuring.lengths()
    drafts = list(dict.fromkeys(models.draft_model or []))
    if sizes:
        counts = {"length in --num-draft": len(lengths), "--proposer": len(measuring.names)}
        for flags, count in {**counts, "--draft-model": len(drafts)}.items():
            if count > 1:
                raise OptionError(f"with --batch-size, name one {flags}")
    if options.max_tokens < 1:
        raise OptionError(f"max-tokens must be 1 or more, not {options.max_tokens}")
    if measuring.report is not None and not os.access(measuring.report.parent, os.W_OK):
        raise OptionError(f"the report cannot be written to {measuring.report.parent}")
    one = Models(**{**vars(models), "draft_model": drafts[0] if drafts else None})
    model, draft_model = named(one)
    file = measuring.prompts or sample(model)
    if output.json:
        check_not_read("standard output", [1], [file])
    if measuring.report is not None:
        check_not_read("--report", [measuring.report], [file, model, draft_model])
    from ..text.prompts import read_prompts

    prompts = read_prompts(file, measuring.limit)
    loading = one.loading()
    pairs = [load_pair(model, draft_model, **loading)]
    from ..engine.loading import with_draft_model

    of_target = ("revision", "q_bits", "adapter_path", "distributed")
    of_draft = {name: value for name, value in loading.items() if name not in of_target}
    for name in drafts[1:]:
        _, draft = named(replace(one, draft_model=name))
        with render.progress("downloading", in_bytes=True) as report:
            of_draft |= {"progress": report, "announce": render.tell}
            pairs.append(with_draft_model(pairs[0], str(draft), **of_draft))
    analysis: Measured
    if sizes:
        analysis, notes = _throughput(pairs[0], options, prompts, measuring)
    else:
        analysis, notes = _speculation(pairs, options, prompts, measuring)
    from ..measure.report import as_dict, setting, write_report

    taken_with = setting(pairs, options, file, notes)
    show(analysis, taken_with, sys.stderr if output.json else sys.stdout)
    for method in analysis.methods:
        if found := method.differences:
            margins = [differing.margin for differing in found if differing.margin is not None]
            ties = sum(differing.tie is True for differing in found)
            where = f", {ties} part at ties, largest margin {max(margins):.2g}" if margins else ""
            share = f"{method.name}: {len(found)} of {method.compared} texts"
            print(f"{share} are not plain decoding's own{where}", file=sys.stderr)
    if any(method.differences for method in analysis.methods) and not options.exact:
        print(ROUNDING, file=sys.stderr)
    if output.json:
        render.write(sys.stdout, render.as_json(as_dict(analysis, taken_with)))
    if measuring.report is not None:
        write_report(analysis, taken_with, measuring.report)
        render.tell(f"report: {measuring.report}")
    if analysis.interrupted:
        raise KeyboardInterrupt


def _speculation(
    pairs: Sequence[Pair],
    options: Options,
    prompts: Sequence[Prompt],
    measuring: Measuring,
) -> tuple[Analysis, list[str]]:
    """Measure single completions.

    Args:
        pairs: One target with each of its draft models.
    Returns:
        The figures, and remarks about other programs.
    Raises:
        KeyboardInterrupt: If it came before there were any figures."""
    from ..engine.request import encode
    from ..measure.analysis import analyse
    from ..measure.margins import comparison
    from ..measure.methods import TURNS, measure, own_methods, pass_timer

    lengths = measuring.lengths()
    methods = own_methods(pairs, options, measuring.names, lengths)
    # Other programs support only draft models.
    pair = next((candidate for candidate in pairs if candidate.draft is not None), pairs[0])
    notes: list[str] = []
    if measuring.baselines:
        from ..measure.baselines import find_baselines, mlx_lm_methods, transformers_methods

        programs = mlx_lm_methods, transformers_methods
        baselines, notes = find_baselines(*programs, pair, options, lengths)
        methods += baselines
    first = encode(pair, prompts[0].turns[0], options)
    passes = pass_timer(pairs, first, [method.num_draft for method in methods])
    turns = -(-TURNS // (measuring.repeats * len(prompts)))

    def between() -> None:
        """Time passes between two completions."""
        passes.turn(turns)

    how: dict[str, Any] = {"repeats": measuring.repeats, "between": between}
    with render.progress("measuring") as bar:
        how["progress"] = bar
        measured = measure(prompts, methods, lambda text: encode(pair, text, options), **how)
    if measured.interrupted:
        interrupts.go_on()
    analysis = analyse(measured, passes.costs(), comparison(pairs[0], options))
    if analysis is None:
        raise KeyboardInterrupt
    return analysis, notes


def _throughput(
    pair: Pair, options: Options, prompts: Sequence[Prompt], measuring: Measuring
) -> tuple[Throughput, list[str]]:
    """Measure the whole file at several batch sizes. Returns and raises as `_speculation` does."""
    from ..measure.margins import comparison
    from ..measure.throughput import encoded, file_methods, measure_files

    sizes, [length] = measuring.sizes(), measuring.lengths()
    ids, skipped = encoded(pair, prompts, options)
    methods, notes = file_methods(pair, options, next(iter(measuring.names), None), length, sizes)
    if measuring.baselines:
        from ..measure import baselines

        programs = baselines.mlx_lm_file_methods, baselines.transformers_file_methods
        found, remarks = baselines.find_baselines(*programs, pair, options, sizes)
        methods, notes = [*methods, *found], [*notes, *remarks]
    how: dict[str, Any] = {"repeats": measuring.repeats, "compare": comparison(pair, options)}
    with render.progress("measuring") as bar:
        throughput = measure_files(ids, methods, skipped=skipped, **how, progress=bar)
    if throughput is None:
        raise KeyboardInterrupt
    return throughput, notes


def show(analysis: Measured, setting: Setting, stream: TextIO) -> None:
    """Write the table to a stream. Raises as render.write does."""
    shown = analysis.presentation()
    laid = render.fitted(stream, shown.table.columns, DISPENSABLE, partial(_table, shown.table))
    draft = f" with {setting.draft_model}" if setting.draft_model else ""
    title = (
        f"{setting.model}{draft}, {setting.dtype}, temperature {setting.temperature:g}; "
        f"{setting.device}, BLAS {setting.blas}"
    )
    caption = f"{analysis.texts} texts, each up to {analysis.repeats} times, methods in turns"
    caption += f"; {len(analysis.skipped)} skipped" if analysis.skipped else ""
    caption += "; interrupted" if analysis.interrupted else ""
    notes = (text for text in (caption, shown.verdict, *setting.notes) if text)
    render.lay_out(stream, title, laid, *notes)


def _table(cells: Cells, columns: Sequence[str]) -> Table:
    """Return a table of these columns. Cells are not cut, and the last word of a heading gets a
    line of its own."""
    places = [cells.columns.index(name) for name in columns]
    names = ["\n".join(name.rsplit(" ", 1)) for name in columns]
    table = render.table(*(f">{name}" if at else name for at, name in enumerate(names)))
    for numbers in table.columns[1:]:
        numbers.no_wrap = True
    for number, row in enumerate(cells.rows):
        style = "bold" if number == cells.best else None
        table.add_row(*(row[at] for at in places), style=style)
    return table
