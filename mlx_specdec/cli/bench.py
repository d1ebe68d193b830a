"""The bench command: a pair and a prompt file in; a table, JSON and a report out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from ..options import Options, proposers
from . import bench_output as bench_table
from . import interrupts, render
from .bench_output import Together, batch_sizes, check_one_method, is_count, measure_throughput
from .flags import Flags, command, flag, options
from .groups import ChatTemplate, CostCache, Json, Models, Sampling, Verification
from .pairs import check_for_translator, load_pair, named, sample

if TYPE_CHECKING:
    from ..engine.generate import Pair
    from ..measure.analysis import Analysis
    from ..measure.methods import Length
    from ..measure.setting import Setting
    from ..measure.table import Measured
    from ..text.prompts import Prompt

LENGTHS = "1,2,3,5,8,auto"


@dataclass(frozen=True)
class Measuring(Flags):
    """What is compared, and how thoroughly."""

    panel = "Measuring"
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
    warmup: int = flag(
        1, "The number of texts, or batches, of each method that do not count.", min=0
    )
    report: Path | None = flag(None, "The HTML file to write plots to.", metavar="FILE")


@dataclass(frozen=True)
class Compared(Models):
    """One target, and what drafts for it."""

    draft_model: list[str] | None = flag(  # type: ignore[assignment]
        None,
        "A draft as generate takes it; the flag may be repeated, to compare several.",
        "--draft-model-name",
    )


@command(
    "mlx-specdec bench prompts/translation.jsonl --limit 10 --report report.html",
    "mlx-specdec bench PROMPTS --model A --draft-model B --draft-model C",
    "mlx-specdec bench --batch-size 1,4,16",
)
def bench(
    measuring: Measuring,
    models: Compared,
    verification: Verification,
    sampling: Sampling,
    template: ChatTemplate,
    costs: CostCache,
    output: Json,
) -> None:
    """Measure what speculation gains on this machine.

    Without arguments, the shipped translator is measured on its sample prompts. Ctrl-C keeps what
    was measured so far.
    """
    asked = options(verification, sampling, template, costs)
    if measuring.baselines and asked.simulated_acceptance is not None:
        raise OptionError(
            "baselines verify what they draft: leave out --simulate-acceptance or --baselines"
        )
    if measuring.baselines and models.adapter_path is not None:
        raise OptionError("baselines take no adapters: leave out --adapter-path or --baselines")
    many = bool(batch_sizes(measuring.batch_size))
    lengths = _lengths(measuring.num_draft or ("auto" if many else LENGTHS))
    proposers = list(dict.fromkeys(measuring.proposer or []))
    drafts = list(dict.fromkeys(models.draft_model or []))
    if many:
        check_one_method(asked, proposers, lengths, drafts)
    if sampling.max_tokens < 1:
        raise OptionError(f"max-tokens must be 1 or more, not {sampling.max_tokens}")
    _check_report(measuring.report)
    one = Models(**{**vars(models), "draft_model": drafts[0] if drafts else None})
    model, draft_model = named(one)
    file = measuring.prompts or sample(model)
    if models.model is None:
        check_for_translator(file)
    from ..text.prompts import read_prompts

    prompts = read_prompts(file, measuring.limit)
    simulated = asked.simulated_acceptance is not None
    loading = {**one.loading(), "random_weights": simulated}
    pairs = [load_pair(model, draft_model, **loading)]
    pairs += [
        _with_draft_model(pairs[0], replace(one, draft_model=draft), loading)
        for draft in drafts[1:]
    ]
    analysis: Measured
    if many:
        analysis, notes = measure_throughput(
            pairs[0], asked, prompts, proposers, lengths[0], measuring
        )
    else:
        together = None
        # Medusa heads do not tell what their target looks like.
        if one.distributed is not None and pairs[0].heads is None:
            together = Together(pairs[0], model, one, lengths)
        analysis, notes = _speculation(
            pairs, asked, prompts, proposers, lengths, measuring, together
        )
    from ..measure.setting import setting

    _tell(analysis, setting(pairs, asked, file, notes), measuring.report, output.json)
    if analysis.interrupted:
        raise KeyboardInterrupt


def _with_draft_model(pair: Pair, models: Models, loading: Mapping[str, Any]) -> Pair:
    """The same target with another draft."""
    from ..engine.generate import with_draft_model

    of_target = ("revision", "q_bits", "adapter_path", "distributed")
    asked = {name: value for name, value in loading.items() if name not in of_target}
    _, draft = named(models)
    with render.progress("downloading", in_bytes=True) as report:
        return with_draft_model(pair, str(draft), progress=report, **asked)


def _lengths(text: str) -> list[Length]:
    lengths: list[Length] = []
    for word in map(str.strip, text.split(",")):
        if word != "auto" and not is_count(word):
            raise OptionError(f"num-draft must look like 1,3,8,auto; {word!r} is no length")
        lengths.append(Options(num_draft="auto" if word == "auto" else int(word)).num_draft)
    return list(dict.fromkeys(lengths))


def _check_report(file: Path | None) -> None:
    """Before hours of measuring, not after."""
    if file is None:
        return
    if file.is_dir():
        raise OptionError(f"{file} is a directory: name a file for the report")
    if os.path.lexists(file) and not file.is_file():
        raise OptionError(f"{file} is no regular file, and would be replaced by one")
    try:
        with TemporaryFile(dir=file.parent):
            pass
    except OSError as problem:
        raise OptionError(
            f"the report cannot be written to {file.parent}: {problem.strerror}"
        ) from None


def _speculation(
    pairs: Sequence[Pair],
    options: Options,
    prompts: Sequence[Prompt],
    proposers: Sequence[str],
    lengths: Sequence[Length],
    measuring: Measuring,
    together: Together | None,
) -> tuple[Analysis, list[str]]:
    """together: the machines, where several share the target."""
    from ..engine.prepare import encode
    from ..measure.analysis import analyse
    from ..measure.methods import TURNS, own_methods, pass_timer
    from ..measure.samples import measure

    methods = own_methods(pairs, options, proposers, lengths)
    # Other programs know draft models alone.
    pair = next((each for each in pairs if each.draft is not None), pairs[0])
    notes: list[str] = []
    if measuring.baselines:
        from ..measure.baselines import find_baselines, mlx_lm_methods
        from ..measure.transformers_baseline import transformers_methods

        others, notes = find_baselines(
            partial(mlx_lm_methods, pair, options, lengths),
            partial(transformers_methods, pair, options, lengths),
        )
        methods += others
        if not others:
            print("no baseline can run these models here", file=sys.stderr)
    first = encode(pair, prompts[0].turns[0], options)
    passes = pass_timer(pairs, first, [method.num_draft for method in methods])
    turns = -(-TURNS // (measuring.repeats * len(prompts)))

    def between() -> None:
        passes.turn(turns)
        if together is not None:
            together.turn(turns)

    with render.progress("measuring") as bar:
        measured = measure(
            prompts,
            methods,
            lambda text: encode(pair, text, options),
            repeats=measuring.repeats,
            warmup=measuring.warmup,
            between=between,
            progress=bar,
        )
    if measured.interrupted:
        interrupts.go_on()
    analysis = analyse(measured, passes.costs())
    if analysis is None:
        raise KeyboardInterrupt
    return analysis if together is None else together.told(analysis), notes


def _tell(analysis: Measured, setting: Setting, report: Path | None, as_json: bool) -> None:
    from ..measure.report import write_report
    from ..measure.table import as_dict

    bench_table.show(analysis, setting, sys.stderr if as_json else sys.stdout)
    for line in bench_table.differences(analysis):
        print(line, file=sys.stderr)
    if as_json:
        render.write(sys.stdout, render.as_json(as_dict(analysis, setting)))
    if report is not None:
        write_report(analysis, setting, report)
        render.tell(f"report: {report}")
