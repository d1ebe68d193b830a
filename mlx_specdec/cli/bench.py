"""The bench command: a pair and a prompt file in; a table, JSON and a report out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from ..options import Options
from . import bench_table, render
from .pairs import ROOT, SHIPPED_DRAFT, SHIPPED_TARGET, load_pair
from .process import Version

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..bench.analysis import Analysis
    from ..bench.baselines import Baselines
    from ..bench.methods import Length, Method
    from ..text.prompts import Prompt

SAMPLES = {"t5-enfr": "translation.jsonl", "py-llama": "python.jsonl"}
"""Prompt files of the shipped targets, by the name of their directory; their heads' too."""


def bench(
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROMPTS",
            help='One prompt a line, or JSON lines with "prompt" or "turns" and "category".',
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "--model-name", help="Target: a directory or a Hub name."),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", "--draft-model-name", help="Draft of the same vocabulary."),
    ] = None,
    draft_vocab: Annotated[
        str,
        typer.Option("--draft-vocab", help="same; intersect drafts what both models can write."),
    ] = "same",
    proposer: Annotated[
        list[str] | None,
        typer.Option("--proposer", help="draft, ngram, medusa or auto; may be repeated."),
    ] = None,
    num_draft: Annotated[
        str, typer.Option("--num-draft", help="Lengths to measure, separated by commas.")
    ] = "1,2,3,5,8,auto",
    limit: Annotated[
        int | None, typer.Option("--limit", help="Only the first so many prompts.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Times that each text is made.")] = 3,
    warmup: Annotated[
        int, typer.Option("--warmup", help="Texts of each method that do not count.")
    ] = 1,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Also mlx-lm, and transformers where torch is installed."),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Most tokens of a text.")
    ] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Decides texts above temperature 0.")] = 0,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="0 is greedy.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus, 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Likeliest k tokens, 0 is off.")] = 0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Least share of the likeliest token, 0 is off.")
    ] = 0.0,
    rule: Annotated[
        str | None, typer.Option("--rule", help="coupled (default), token, block or typical.")
    ] = None,
    simulate_acceptance: Annotated[
        float | None,
        typer.Option(
            "--simulate-acceptance",
            help="Measure decoding as if so many drafted tokens were accepted; makes no text. "
            "Weights that are not here are random.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")
    ] = "auto",
    q_bits: Annotated[
        int | None, typer.Option("--q-bits", help="Quantise the target on load.")
    ] = None,
    draft_q_bits: Annotated[
        int | None,
        typer.Option("--draft-q-bits", "--draft-bits", help="Quantise the draft on load."),
    ] = None,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Take prompts as they are.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="auto begins without costs of earlier texts.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write one HTML file with plots.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; the table goes to stderr.")
    ] = False,
    version: Version = False,
) -> None:
    """Measure what speculation gains for a pair and a file of prompts, on this machine.

    Without arguments: the shipped translator on its sample prompts. Ctrl-C keeps what was measured.
    """
    options = Options(
        max_tokens=max_tokens,
        rule=rule,
        seed=seed,
        cost_cache=not no_cache,
        chat_template=not no_chat_template,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        simulated_acceptance=simulate_acceptance,
    )
    if peers and simulate_acceptance is not None:
        raise OptionError("peers judge what they draft: leave out --simulate-acceptance or --peers")
    lengths = _lengths(num_draft)
    _check_counts(limit=limit, repeats=repeats, max_tokens=max_tokens)
    if warmup < 0:
        raise OptionError(f"warmup must be 0 or more, not {warmup}")
    _check_report(report)
    if model is None:
        draft_model = draft_model or SHIPPED_DRAFT
    file = prompts or sample(model or SHIPPED_TARGET)
    from ..text.prompts import read_prompts

    asked = read_prompts(file, limit)
    pair = load_pair(
        model or SHIPPED_TARGET,
        draft_model,
        dtype=dtype,
        q_bits=q_bits,
        draft_q_bits=draft_q_bits,
        draft_vocab=draft_vocab,
        random_weights=simulate_acceptance is not None,
    )
    methods = _methods(pair, options, proposer or [], lengths)
    others = _peers(pair, options, lengths) if peers else None
    if others is not None:
        methods += others.methods
    analysis = _measure(pair, options, asked, methods, repeats, warmup)
    notes = others.notes if others is not None else ()
    _tell(pair, options, file, notes, analysis, report, as_json)
    if analysis.interrupted:
        raise KeyboardInterrupt


def _lengths(text: str) -> list[Length]:
    lengths = list(dict.fromkeys(_length(item.strip()) for item in text.split(",")))
    for length in lengths:
        Options(num_draft=length)
    return lengths


def _length(word: str) -> Length:
    if word == "auto":
        return "auto"
    if not (word.isascii() and word.isdigit() and int(word) > 0):
        raise OptionError(f"num-draft must look like 1,3,8,auto; {word!r} is no length")
    return int(word)


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise OptionError(f"{name.replace('_', '-')} must be 1 or more, not {count}")


def _check_report(file: Path | None) -> None:
    """Before hours of measuring, not after."""
    if file is None:
        return
    if file.is_dir():
        raise OptionError(f"{file} is a directory: name a file for the report")
    if not file.parent.is_dir():
        raise OptionError(f"there is no directory {file.parent} for the report: make it first")


def sample(model: str) -> Path:
    """The prompts for a target that comes with the repository; OptionError for any other."""
    name = SAMPLES.get(Path(model).name.removesuffix("-medusa"))
    if name is None or not (ROOT / "prompts" / name).is_file():
        raise OptionError("no prompts: name a file with one prompt a line")
    return ROOT / "prompts" / name


def _methods(
    pair: Pair, options: Options, proposers: Sequence[str], lengths: Sequence[Length]
) -> list[Method]:
    from ..bench.methods import own_methods

    return own_methods(pair, options, list(dict.fromkeys(proposers)), lengths)


def _peers(pair: Pair, options: Options, lengths: Sequence[Length]) -> Baselines:
    from ..bench.baselines import find_baselines

    found = find_baselines(pair, options, lengths)
    if not found.methods:
        print("no baseline can run these models here", file=sys.stderr)
    return found


def _measure(
    pair: Pair,
    options: Options,
    prompts: Sequence[Prompt],
    methods: Sequence[Method],
    repeats: int,
    warmup: int,
) -> Analysis:
    from ..assemble import encode
    from ..bench.analysis import analyse
    from ..bench.costs import TURNS, pass_timer
    from ..bench.measure import measure

    first = encode(pair, prompts[0].turns[0], options)
    passes = pass_timer(pair, first, [method.num_draft for method in methods])
    turns = -(-TURNS // (repeats * len(prompts)))
    with render.progress("measuring") as bar:
        found = measure(
            prompts,
            methods,
            lambda text: encode(pair, text, options),
            repeats=repeats,
            warmup=warmup,
            between=lambda: passes.turn(turns),
            progress=bar,
        )
    analysis = analyse(found, passes.costs())
    if analysis is None:
        raise KeyboardInterrupt
    return analysis


def _tell(
    pair: Pair,
    options: Options,
    prompts: Path,
    notes: Sequence[str],
    analysis: Analysis,
    report: Path | None,
    as_json: bool,
) -> None:
    from ..bench.report import write_report
    from ..bench.setting import setting

    around = setting(pair, options, prompts, notes)
    told: dict[str, Any] = {"setting": around.as_dict(), **analysis.as_dict()}
    bench_table.show(analysis, around, sys.stderr if as_json else sys.stdout)
    differences = bench_table.describe_differences(analysis)
    if differences:
        print(differences, file=sys.stderr)
    if as_json:
        render.write(sys.stdout, json.dumps(told, ensure_ascii=False) + "\n")
    if report is not None:
        write_report(analysis, around, report)
        print(f"report: {report}", file=sys.stderr)
