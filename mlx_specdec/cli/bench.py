"""The bench command: a pair and a prompt file in; a table, JSON and a report out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from ..errors import OptionError
from ..options import Options, proposers
from . import bench_table, render
from .flags import Flags, command, flag, options
from .groups import ChatTemplate, CostCache, Json, Models, Sampling, Verification
from .pairs import ROOT, load_pair, named

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..bench.analysis import Analysis
    from ..bench.methods import Length, Method
    from ..bench.setting import Setting
    from ..text.prompts import Prompt

SAMPLES = {"t5-enfr": "translation.jsonl", "py-llama": "python.jsonl"}
"""Prompt files of the shipped targets, by the name of their directory; their heads' too."""


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
        "A drafter to measure; the flag may be repeated.",
        metavar="|".join(proposers()[:-1]),
        autocompletion=proposers,
    )
    num_draft: str = flag(
        "1,2,3,5,8,auto",
        "The draft lengths to measure, separated by commas.",
        "--num-draft-tokens",
        metavar="N,...,auto",
    )
    baselines: bool = flag(
        False, "Measure mlx-lm as well, and transformers where torch is installed.", "--peers"
    )
    limit: int | None = flag(None, "The number of prompts to use, from the first one on.", min=1)
    repeats: int = flag(3, "The number of times that each text is generated.", min=1)
    warmup: int = flag(1, "The number of texts of each method that do not count.", min=0)
    report: Path | None = flag(None, "The HTML file to write plots to.", metavar="FILE")


@command("mlx-specdec bench prompts/translation.jsonl --limit 10 --report report.html")
def bench(
    measuring: Measuring,
    models: Models,
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
    lengths = _lengths(measuring.num_draft)
    if sampling.max_tokens < 1:
        raise OptionError(f"max-tokens must be 1 or more, not {sampling.max_tokens}")
    _check_report(measuring.report)
    model, draft_model = named(models)
    file = measuring.prompts or sample(model)
    from ..text.prompts import read_prompts

    prompts = read_prompts(file, measuring.limit)
    simulated = asked.simulated_acceptance is not None
    pair = load_pair(model, draft_model, random_weights=simulated, **models.loading())
    from ..bench.methods import own_methods

    proposers = list(dict.fromkeys(measuring.proposer or []))
    methods = own_methods(pair, asked, proposers, lengths)
    notes: Sequence[str] = ()
    if measuring.baselines:
        from ..bench.baselines import find_baselines

        others, notes = find_baselines(pair, asked, lengths)
        methods += others
        if not others:
            print("no baseline can run these models here", file=sys.stderr)
    analysis = _measure(pair, asked, prompts, methods, measuring)
    from ..bench.setting import setting

    _tell(analysis, setting(pair, asked, file, notes), measuring.report, output.json)
    if analysis.interrupted:
        raise KeyboardInterrupt


def _lengths(text: str) -> list[Length]:
    lengths: list[Length] = []
    for word in map(str.strip, text.split(",")):
        if word != "auto" and not (word.isascii() and word.isdigit() and int(word) > 0):
            raise OptionError(f"num-draft must look like 1,3,8,auto; {word!r} is no length")
        lengths.append(Options(num_draft="auto" if word == "auto" else int(word)).num_draft)
    return list(dict.fromkeys(lengths))


def _check_report(file: Path | None) -> None:
    """Before hours of measuring, not after."""
    if file is None:
        return
    if file.is_dir():
        raise OptionError(f"{file} is a directory: name a file for the report")
    try:
        with TemporaryFile(dir=file.parent):
            pass
    except OSError as problem:
        raise OptionError(
            f"the report cannot be written to {file.parent}: {problem.strerror}"
        ) from None


def sample(model: str) -> Path:
    """The prompts for a target that comes with the repository; OptionError for any other."""
    name = SAMPLES.get(Path(model).name.removesuffix("-medusa"))
    if name is None or not (ROOT / "prompts" / name).is_file():
        raise OptionError("no prompts: name a file with one prompt a line")
    return ROOT / "prompts" / name


def _measure(
    pair: Pair,
    options: Options,
    prompts: Sequence[Prompt],
    methods: Sequence[Method],
    measuring: Measuring,
) -> Analysis:
    from ..assemble import encode
    from ..bench.analysis import analyse
    from ..bench.measure import measure
    from ..bench.methods import TURNS, pass_timer

    first = encode(pair, prompts[0].turns[0], options)
    passes = pass_timer(pair, first, [method.num_draft for method in methods])
    turns = -(-TURNS // (measuring.repeats * len(prompts)))
    with render.progress("measuring") as bar:
        measured = measure(
            prompts,
            methods,
            lambda text: encode(pair, text, options),
            repeats=measuring.repeats,
            warmup=measuring.warmup,
            between=lambda: passes.turn(turns),
            progress=bar,
        )
    analysis = analyse(measured, passes.costs())
    if analysis is None:
        raise KeyboardInterrupt
    return analysis


def _tell(analysis: Analysis, setting: Setting, report: Path | None, as_json: bool) -> None:
    from ..bench.report import write_report
    from ..bench.table import as_dict

    bench_table.show(analysis, setting, sys.stderr if as_json else sys.stdout)
    for line in bench_table.differences(analysis):
        print(line, file=sys.stderr)
    if as_json:
        render.write(sys.stdout, render.as_json(as_dict(analysis, setting)))
    if report is not None:
        write_report(analysis, setting, report)
        render.tell(f"report: {report}")
