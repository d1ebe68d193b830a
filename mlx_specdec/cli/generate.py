"""The generate command: print the completion of a prompt."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import system
from ..core.options import Options
from ..errors import OptionError, PromptError
from . import render
from .flags import Constraints, Flags, Json, SpecialTokens, command, flag
from .loading import SHIPPED_PROMPT, TextFlags, load_drafting

if TYPE_CHECKING:
    from ..engine.generate import Run
    from ..engine.pair import Pair
    from ..engine.prompt_cache import PromptCache

BYTE_ORDER_MARK = "\ufeff"
PIPE_SECONDS = 5.0
"""Seconds to wait for the first byte from standard input if no prompt is named."""
TURNS = 3
"""How often plain and speculative decoding are timed, alternately, after one warm-up each."""


class PromptFlags(Flags, panel="Prompt"):
    prompt_words: str | None = flag(
        "The prompt; - reads standard input. Without a prompt, a pipe on standard input is read.",
        argument=True,
        metavar="PROMPT",
    )
    prompt: str | None = flag("The prompt, as a flag.", None, "-p")
    prompt_file: Path | None = flag("A file that holds the prompt.", metavar="FILE")

    prompt_cache_dir: Path | None = flag(
        "The directory of a prefix cache on disk. If an earlier prompt began in the same way, its "
        "beginning is not prefilled again. With --max-tokens 0, the prompt is only prefilled.",
        metavar="DIR",
    )


class GenerateFlags(SpecialTokens, Constraints, TextFlags):
    """Flags that change the completion."""


class Output(Json):
    show_drafts: bool = flag("Mark the accepted draft tokens in the completion.")
    verbose: bool = flag("Print the chosen draft length, and the reason.")
    quiet: bool = flag("Print the completion only, without statistics, progress and notes.")


@command(
    'mlx-specdec generate "translate English to French: I am cold."',
    'mlx-specdec generate "def f(x):" --model weights/py-llama --proposer ngram',
)
def generate(prompt: PromptFlags, flags: GenerateFlags, output: Output) -> None:
    """Generate a completion of a prompt.

    Without arguments, the shipped translator translates a sample sentence, and says how much faster
    than plain decoding it was."""
    options = flags.options()
    text = read_prompt(prompt.prompt_words, prompt.prompt, prompt.prompt_file)
    demo = text is None and flags.model is None
    if demo:
        text = SHIPPED_PROMPT
    if text is None:
        raise PromptError("no prompt: give one as an argument, with --prompt-file, or - for stdin")
    if not text.strip():
        raise PromptError("the prompt is empty: give some text")
    pair, options = load_drafting(flags, options)
    from ..engine.pair import with_history
    from ..engine.prompt_cache import Store
    from ..engine.request import missing_prefix

    if demo:
        render.note(f"prompt: {text}")
    elif prefix := missing_prefix(pair, text, options):
        render.note(f'"{prefix}" was put before the prompt, as the target\'s config.json asks')
    lines = sum(1 for line in text.splitlines() if line.strip())
    if lines > 1 and pair.target.kind == "encoder-decoder":
        render.tell(
            f"warning: the {lines} lines of the prompt are read as one text; mlx-specdec batch "
            "FILE -o - makes a text of each line"
        )
    directory = prompt.prompt_cache_dir
    cached = None if directory is None else Store(directory=directory).open(pair)
    if cached is not None:
        pair = with_history(pair, cached.sequences)
    printer = None if output.json else render.TextPrinter(sys.stdout, output.show_drafts)
    if output.show_drafts and not (output.quiet or output.json):
        print(render.legend(sys.stdout), file=sys.stderr)
    run = completed(pair, text, options, cached, printer)
    result = run.result()
    if output.json:
        payload = {**result.as_dict(), "draft_length": run.reason}
        render.write(sys.stdout, render.as_json(payload))
    else:
        render.note(render.cut(result, options.max_tokens))
        render.note(render.summary(result))
    if cached is not None:
        cached.close()
    if output.verbose:
        print(render.lengths(run.reason, result), file=sys.stderr)
    if result.finish_reason == "interrupted":
        raise KeyboardInterrupt
    if demo and result.tokens and not (output.quiet or output.json or options.regular):
        print_speedup(pair, text, options)


def read_prompt(words: str | None, prompt: str | None, file: Path | None) -> str | None:
    """Read the prompt from an argument, a flag, a file or standard input. If a file ends
    with a line break, the prompt does not contain it.

    Args:
        words, prompt: The argument and the value of --prompt; "-" means standard input.
        file: The value of --prompt-file.
    Returns:
        The prompt, or None if there is none.
    Raises:
        OptionError: If more than one prompt is given.
        PromptError: If the prompt cannot be read, or is not UTF-8 text."""
    sources = [source for source in (words, prompt, file) if source is not None]
    if len(sources) > 1:
        raise OptionError("more than one prompt: give an argument, --prompt or --prompt-file")
    source: str | Path | None = sources[0] if sources else _piped()
    if isinstance(source, Path):
        return system.read_text(source, PromptError).removesuffix("\n")
    try:
        if source == "-":
            source = sys.stdin.read().removeprefix(BYTE_ORDER_MARK).removesuffix("\n")
            if not source.strip():
                raise PromptError("standard input is empty: give a prompt there, or as an argument")
        # Bytes that are not UTF-8 became lone surrogates, which fail here.
        (source or "").encode("utf-8")
    except OSError as problem:
        raise PromptError(f"cannot read standard input: {problem.strerror}") from None
    except UnicodeError:
        raise PromptError("the prompt is not UTF-8 text") from None
    return source


def _piped() -> str | None:
    """Return "-" if standard input is a file, or a pipe from which data come in time; else None."""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):
        return None
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return None
    if select.select([number], [], [], PIPE_SECONDS)[0]:
        return "-"
    render.tell("nothing came on standard input, which is left alone: - waits for it")
    return None


def completed(
    pair: Pair,
    prompt: str | Sequence[int],
    options: Options,
    cache: PromptCache | None,
    printer: render.TextPrinter | None,
    interrupted: Callable[[], None] = lambda: None,
) -> Run:
    """Generate a completion and print its text as soon as it is known. Return the finished run.

    Args:
        printer: Prints the text and what there is to say about it. None prints nothing.
        interrupted: Called after Ctrl-C, which ends the completion early."""
    from ..engine.generate import stream_generate
    from ..engine.request import special_texts

    show = (lambda step: None) if printer is None else printer.show
    with render.progress("prefilling the prompt") as report:
        timed = printer is None
        run = stream_generate(pair, prompt, options, progress=report, timed=timed, cache=cache)
        try:
            with render.slowly("prefilling the prompt"):
                run.prefill()
            for step in run:
                show(step)
        except KeyboardInterrupt:
            interrupted()
    show(run.interrupt())
    if printer is not None:
        printer.finish()
        if sentence := render.ending(run.result(), special_texts(pair)):
            render.tell(sentence)
    return run


def print_speedup(pair: Pair, prompt: str, options: Options) -> None:
    """Measure the prompt with and without speculation, and print the speedup in one line."""
    from ..measure.figures import benchmark
    from ..text.prompts import Prompt

    prompts, proposers = [Prompt((prompt,))], [options.proposer or "auto"]
    measured = [pair], options, prompts, proposers, [options.num_draft]
    found, _ = benchmark(*measured, repeats=TURNS)
    if found is None or found.interrupted:
        raise KeyboardInterrupt
    plain, fast = found.methods
    same = "the same text" if fast.compared and not fast.differences else "another text"
    program = "./scripts/run.sh" if Path(sys.argv[0]).name == "main.py" else "mlx-specdec generate"
    hint = f'next: {program} --show-drafts "Where is the station?", or mlx-specdec --help'
    if system.device_name() == "cpu" and system.blas_is_slow():
        hint = f"what is missing is a fast BLAS: {system.install('fast-cpu')}"
    render.tell(
        f"timed again, {TURNS} times each: {fast.speed_up:.2f} times as fast as plain decoding "
        f"({fast.tokens_per_second:.0f} against {plain.tokens_per_second:.0f} tokens/s), {same}; "
        f"{hint}"
    )
