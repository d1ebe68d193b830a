"""The commands: what may be typed, and how it ends.

Knows flags, streams and exit codes. MLX is imported inside the commands, once the flags are known
to be right, so that --help and wrong flags answer at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .. import __version__
from ..cache_settings import CacheSettings
from ..errors import OptionError, OutputError, PromptError, SpecdecError
from ..options import Options
from . import render

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..decoding.run import Result, Run

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_TARGET = "weights/t5-enfr"
SHIPPED_DRAFT = "weights/t5-enfr-draft"
SHIPPED_PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)
INTERRUPTED = 130
STANDARD_OUTPUT = 1

app = typer.Typer(
    help="Speculative decoding on Apple's MLX: the target model's own text, faster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-specdec {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
]


@app.callback()
def _front(version: Version = False) -> None:
    pass


@app.command()
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
        typer.Option("--draft-model", "--draft-model-name", help="Draft of the same vocabulary."),
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
        typer.Option("--proposer", help="draft, ngram (looks back in prompt and text) or none."),
    ] = None,
    speculate: Annotated[
        int | None,
        typer.Option("--speculate", help="Propose so many; without a draft model by ngram."),
    ] = None,
    ngram_min: Annotated[
        int, typer.Option("--ngram-min", help="Shortest match that ngram trusts, in tokens.")
    ] = 2,
    ngram_choice: Annotated[
        str, typer.Option("--ngram-choice", help="Which continuation: recent or frequent.")
    ] = "recent",
    num_draft: Annotated[
        str, typer.Option("--num-draft", help="Drafted tokens a round, or auto.")
    ] = "5",
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
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")
    ] = "auto",
    q_bits: Annotated[
        int | None, typer.Option("--q-bits", help="Quantise the target on load.")
    ] = None,
    draft_q_bits: Annotated[
        int | None, typer.Option("--draft-q-bits", help="Quantise the draft on load.")
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
    if speculate is not None and proposer is None and draft_model is None:
        proposer = "ngram"
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
    if model is None:
        text = text if text is not None else SHIPPED_PROMPT
        draft_model = draft_model or SHIPPED_DRAFT if proposer in (None, "draft") else None
    if text is None:
        raise PromptError("no prompt: give one as an argument, with --prompt-file, or - for stdin")
    if not text.strip():
        raise PromptError("the prompt is empty: give some text")
    pair = _load(
        model or SHIPPED_TARGET,
        None if regular_decode or proposer in ("ngram", "none") else draft_model,
        dtype=dtype,
        q_bits=q_bits,
        draft_q_bits=draft_q_bits,
        caches=caches,
        draft_vocab=draft_vocab,
    )
    run = _generate(pair, text, options, show_drafts=show_drafts, quiet=quiet, as_json=as_json)
    if verbose:
        print(render.lengths(run.changes, run.result()), file=sys.stderr)
    if run.result().finish_reason == "interrupted":
        raise KeyboardInterrupt


@app.command()
def convert(
    model: Annotated[
        str, typer.Option("--model", "--model-name", help="A directory or a Hub name.")
    ],
    mlx_path: Annotated[
        Path | None, typer.Option("--mlx-path", help="Where to write; weights/NAME by default.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option("--dtype", help="As stored where not given."),
    ] = None,
    quantize: Annotated[bool, typer.Option("--quantize", "-q", help="Quantise.")] = False,
    q_bits: Annotated[int, typer.Option("--q-bits", help="Bits of a quantised weight.")] = 4,
    q_group_size: Annotated[
        int, typer.Option("--q-group-size", help="Weights that share one scale.")
    ] = 64,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size", help="Of one file written, for example 500MB; 4GB by default."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Of a Hub name.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what lies at the destination.")
    ] = False,
    version: Version = False,
) -> None:
    """Turn a T5 or Llama-family checkpoint into MLX weights, and check them."""
    from .. import blas

    blas.load()
    from ..assemble import compare_logits
    from ..checkpoints import sizes
    from ..checkpoints.convert import convert as run

    shard_bytes = None if max_shard_size is None else sizes.parse(max_shard_size)
    with render.progress("converting", in_bytes=True) as report:
        done = run(
            model,
            mlx_path,
            dtype=dtype,
            quantize=quantize,
            q_bits=q_bits,
            q_group_size=q_group_size,
            revision=revision,
            overwrite=overwrite,
            shard_bytes=shard_bytes,
            compare_logits=compare_logits,
            progress=report,
        )
    print(render.converted(done), file=sys.stderr)


@app.command()
def calibrate(
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", "--draft-model-name", help="The draft.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "--model-name", help="The target.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="Drawing costs time of its own.")
    ] = 0.0,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")
    ] = "auto",
    turns: Annotated[int, typer.Option("--turns", help="Rounds of every length.")] = 8,
    version: Version = False,
) -> None:
    """Measure what rounds of a pair cost on this machine, for --num-draft auto."""
    if turns < 1:
        raise OptionError(f"turns must be 1 or more, not {turns}")
    if model is None:
        draft_model = draft_model or SHIPPED_DRAFT
    pair = _load(
        model or SHIPPED_TARGET,
        draft_model,
        dtype=dtype,
        q_bits=None,
        draft_q_bits=None,
        caches=CacheSettings(),
        draft_vocab="same",
    )
    from ..assemble import calibrate as measure

    with render.progress("measuring") as report:
        costs = measure(pair, temperature=temperature, turns=turns, progress=report)
    print(render.costs(costs))


def main() -> None:
    """The console script."""
    _exit_with(app, None)


def run_one(command: Callable[..., Any]) -> None:
    """Run one command as a program of its own, with the process's arguments."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command()(command)
    _exit_with(single, None)


def _exit_with(program: typer.Typer, arguments: Sequence[str] | None) -> None:
    try:
        code = program(args=arguments, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except OutputError as problem:
        _abandon_output()
        render.error(str(problem))
        sys.exit(2)
    except SpecdecError as problem:
        render.error(str(problem))
        sys.exit(2)
    except render.ReaderGone:
        _abandon_output()
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as problem:
        _exit_on_usage(problem)
        raise


def _abandon_output() -> None:
    """What is left in the buffer of standard output cannot be written, at exit neither."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)


def _exit_on_usage(problem: Exception) -> None:
    """Wrong flags: typer raises its own classes, told apart by what they carry."""
    code = getattr(problem, "exit_code", None)
    describe = getattr(problem, "format_message", None)
    if code is None:
        return
    if type(problem).__name__ == "Abort":
        sys.exit(INTERRUPTED)
    if describe is None:
        sys.exit(code)
    render.error(f"{describe()} (see --help)")
    sys.exit(2)


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


def _shipped(name: str) -> str:
    """A relative directory that is not here but beside the program is meant there."""
    if not Path(name).exists() and (ROOT / name).is_dir():
        return str(ROOT / name)
    return name


def _load(
    model: str,
    draft_model: str | None,
    *,
    dtype: str,
    q_bits: int | None,
    draft_q_bits: int | None,
    caches: CacheSettings,
    draft_vocab: str,
) -> Pair:
    from .. import blas

    blas.load()
    from ..assemble import load

    with render.progress("loading") as report:
        return load(
            _shipped(model),
            None if draft_model is None else _shipped(draft_model),
            dtype=dtype,
            q_bits=q_bits,
            draft_q_bits=draft_q_bits,
            caches=caches,
            draft_vocab=draft_vocab,
            progress=report,
        )


def _generate(
    pair: Pair, text: str, options: Options, *, show_drafts: bool, quiet: bool, as_json: bool
) -> Run:
    from ..assemble import stream_generate

    with render.progress("reading the prompt") as report:
        run = stream_generate(pair, text, options, progress=report)
    result = _finish(run) if as_json else _stream(run, show_drafts and not quiet, show_drafts)
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
