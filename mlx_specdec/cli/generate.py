"""The generate command: flags and prompt in, streamed text and statistics out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..cache_settings import CacheSettings
from ..errors import OptionError, PromptError
from ..options import SELF, Options
from . import render
from .pairs import SHIPPED_DRAFT, SHIPPED_PROMPT, SHIPPED_TARGET, load_pair, search_in
from .process import Version

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..decoding.run import Result, Run


SEARCHING = ("auto", "ngram")
"""Proposers that look things up."""


def generate(
    prompt_words: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; - reads standard input."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "--model-name", help="Target: a directory or a Hub name."),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", "--draft-model-name", help="Draft, or self."),
    ] = None,
    draft_vocab: Annotated[
        str,
        typer.Option("--draft-vocab", help="same; intersect drafts what both models can write."),
    ] = "same",
    prompt: Annotated[str | None, typer.Option("--prompt", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="Read the prompt from a file.")
    ] = None,
    proposer: Annotated[
        str | None,
        typer.Option(
            "--proposer", help="draft, ngram (looks back in prompt and text), medusa, auto or none."
        ),
    ] = None,
    speculate: Annotated[
        int | None,
        typer.Option("--speculate", help="Propose so many; without draft and heads by ngram."),
    ] = None,
    ngram_min: Annotated[
        int | None,
        typer.Option(
            "--ngram-min",
            help="Shortest match that ngram trusts, in tokens: 2, and 4 where a draft is next.",
        ),
    ] = None,
    ngram_choice: Annotated[
        str, typer.Option("--ngram-choice", help="Which continuation: recent or frequent.")
    ] = "recent",
    lookup_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--lookup-file",
            exists=True,
            dir_okay=False,
            help="A text that ngram searches as well; repeatable.",
        ),
    ] = None,
    num_draft: Annotated[
        str, typer.Option("--num-draft", help="Drafted tokens a round, or auto.")
    ] = "auto",
    delta: Annotated[
        float, typer.Option("--delta", help="Lenience, 0 to 1; above 0 the text is lossy.")
    ] = 0.0,
    regular_decode: Annotated[
        bool, typer.Option("--regular-decode", help="Plain decoding, without a draft.")
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Most tokens to generate.")
    ] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Decides the text above temperature 0.")] = 0,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="0 is greedy.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus, 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Likeliest k tokens, 0 is off.")] = 0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Least share of the likeliest token, 0 is off.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1 discourages repeats.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Subtracted once per token seen.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="Subtracted per occurrence.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=VALUE", help="Added to one logit; repeatable."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            "--rule", help="coupled (default: same text as plain), token, block; typical is lossy."
        ),
    ] = None,
    posterior_threshold: Annotated[
        float, typer.Option("--posterior-threshold", help="Of rule typical.")
    ] = 0.09,
    posterior_alpha: Annotated[
        float, typer.Option("--posterior-alpha", help="Of rule typical.")
    ] = 0.3,
    simulate_acceptance: Annotated[
        float | None,
        typer.Option(
            "--simulate-acceptance",
            help="Measure decoding as if so many drafted tokens were accepted; prints no text. "
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
    kv_bits: Annotated[
        int | None, typer.Option("--kv-bits", help="Quantise the KV cache: 2, 3, 4, 6 or 8.")
    ] = None,
    kv_group_size: Annotated[
        int, typer.Option("--kv-group-size", help="Values of the cache that share one scale.")
    ] = 64,
    max_kv_size: Annotated[
        int | None, typer.Option("--max-kv-size", help="Keep the newest tokens only.")
    ] = None,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Take the prompt as it is.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither use nor keep what rounds cost here.")
    ] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark accepted draft tokens.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say which draft lengths were chosen, and why.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Text only, no statistics.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    version: Version = False,
) -> None:
    """Generate text. Without arguments: the shipped translator on a sample sentence."""
    lookup_files = lookup_file or []
    guessed = proposer is None and draft_model is None
    if lookup_files and proposer is None:
        proposer = "auto"
    elif speculate is not None and guessed:
        proposer = "ngram"
    if lookup_files and proposer not in SEARCHING and not regular_decode:
        raise OptionError("--lookup-file is for lookup: give --proposer ngram or auto")
    options = Options(
        max_tokens=max_tokens,
        num_draft=_draft_count(num_draft) if speculate is None else speculate,
        proposer=proposer,
        ngram_min=ngram_min,
        ngram_choice=ngram_choice,
        rule=rule,
        delta=delta,
        posterior_threshold=posterior_threshold,
        posterior_alpha=posterior_alpha,
        seed=seed,
        stop=tuple(stop or ()),
        regular=regular_decode,
        cost_cache=not no_cache,
        simulated_acceptance=simulate_acceptance,
        chat_template=not no_chat_template,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias or ()),
    )
    caches = CacheSettings(kv_bits, kv_group_size, max_kv_size)
    text = _read_prompt(prompt_words, prompt, prompt_file)
    if text is None and (model is None or simulate_acceptance is not None):
        text = SHIPPED_PROMPT
    if model is None:
        draft_model = draft_model or SHIPPED_DRAFT if proposer in (None, "auto", "draft") else None
    if text is None:
        raise PromptError("no prompt: give one as an argument, with --prompt-file, or - for stdin")
    if not text.strip():
        raise PromptError("the prompt is empty: give some text")
    pair = load_pair(
        model or SHIPPED_TARGET,
        None if regular_decode or proposer in ("ngram", "medusa", "none") else draft_model,
        dtype=dtype,
        q_bits=q_bits,
        draft_q_bits=draft_q_bits,
        caches=caches,
        draft_vocab=draft_vocab,
        random_weights=simulate_acceptance is not None,
    )
    if lookup_files and proposer in SEARCHING and not regular_decode:
        pair = search_in(pair, lookup_files)
    if draft_model == SELF and pair.draft is not None and not (quiet or as_json):
        render.tell_self_draft(pair.draft_bytes)
    if pair.heads is not None and guessed and not lookup_files:
        options = replace(options, proposer=None)
    run = _generate(pair, text, options, show_drafts=show_drafts, quiet=quiet, as_json=as_json)
    if verbose:
        print(render.lengths(run.changes, run.result()), file=sys.stderr)
    if run.result().finish_reason == "interrupted":
        raise KeyboardInterrupt


def _draft_count(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"--num-draft must be a number or auto, not {text!r}") from None


def _biases(items: Sequence[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise OptionError(
                f"--logit-bias must look like ID=VALUE, for example 42=-5, not {item!r}"
            ) from None
    return biases


def _read_prompt(words: str | None, prompt: str | None, file: Path | None) -> str | None:
    given = [source for source in (words, prompt, file) if source is not None]
    if len(given) > 1:
        raise OptionError("more than one prompt: give an argument, --prompt or --prompt-file")
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        text = words if words is not None else prompt
        return sys.stdin.read() if text == "-" else text
    except OSError as problem:
        raise PromptError(f"cannot read the prompt from {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError("the prompt is not UTF-8 text") from None


def _generate(
    pair: Pair, text: str, options: Options, *, show_drafts: bool, quiet: bool, as_json: bool
) -> Run:
    from ..assemble import stream_generate

    with render.progress("reading the prompt") as report:
        run = stream_generate(pair, text, options, progress=report)
    silent = as_json or options.simulated_acceptance is not None
    result = _finish(run) if silent else _stream(run, show_drafts and not quiet, show_drafts)
    if as_json:
        render.write(sys.stdout, json.dumps(result.as_dict(), ensure_ascii=False) + "\n")
    elif not quiet:
        print(render.summary(result), file=sys.stderr)
    return run


def _finish(run: Run) -> Result:
    try:
        return run.result()
    except KeyboardInterrupt:
        run.interrupt()
        return run.result()


def _stream(run: Run, explain: bool, show_drafts: bool) -> Result:
    printer = render.TextPrinter(sys.stdout, show_drafts=show_drafts)
    if explain:
        print(render.legend(sys.stdout), file=sys.stderr)
    try:
        for emission in run:
            printer.show(emission)
    except KeyboardInterrupt:
        printer.show(run.interrupt())
    printer.finish()
    return run.result()
