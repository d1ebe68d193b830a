"""The generate command: flags and prompt in, streamed text and statistics out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OptionError, PromptError
from ..options import Options
from . import figures, render
from .demo import tell_speedup
from .drafting import Drafting, load_drafting
from .flags import Flags, command, flag, options
from .groups import (
    ChatTemplate,
    CostCache,
    Json,
    KVCache,
    Lenience,
    Models,
    Sampling,
    Verification,
)
from .pairs import SHIPPED_PROMPT
from .prompt import read_prompt
from .text_flags import Constraints, Penalties

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..decoding.run import Run
    from ..decoding.stopwatch import Timed
    from ..prompt_cache.cache import PromptCache
    from ..prompt_cache.store import Store


@dataclass(frozen=True)
class Prompt(Flags):
    """Where the prompt comes from."""

    panel = "Prompt"
    prompt_words: str | None = flag(
        None,
        "The prompt. Without one, a pipe on standard input is read; - reads it always.",
        argument=True,
        metavar="PROMPT",
    )
    prompt: str | None = flag(None, "The prompt, as a flag.", "-p")
    prompt_file: Path | None = flag(None, "A file that holds the prompt.", metavar="FILE")


@dataclass(frozen=True)
class PromptCacheFile(Flags):
    """What is kept of a prompt for the next one."""

    panel = "Prompt"
    prompt_cache_file: Path | None = flag(
        None,
        "A file that keeps what was computed of prompts. The prompt is given whole, what the file "
        "has of its beginning is not read again, and the file is written when all is done; "
        "--max-tokens 0 writes that of the prompt alone.",
        metavar="FILE",
    )


@dataclass(frozen=True)
class Output(Json):
    """What is printed."""

    show_drafts: bool = flag(False, "Mark the accepted draft tokens in the text.")
    verbose: bool = flag(False, "Say which draft lengths were chosen, and why.")
    quiet: bool = flag(False, "Print the text only, without statistics.")


@command(
    'mlx-specdec generate "translate English to French: I am cold."',
    'mlx-specdec generate "def f(x):" --model weights/py-llama --proposer ngram',
)
def generate(
    prompt: Prompt,
    prompt_cache: PromptCacheFile,
    template: ChatTemplate,
    models: Models,
    cache: KVCache,
    drafting: Drafting,
    costs: CostCache,
    verification: Verification,
    lenience: Lenience,
    sampling: Sampling,
    penalties: Penalties,
    constraints: Constraints,
    output: Output,
) -> None:
    """Generate text.

    Without arguments, the shipped translator translates a sample sentence, and says how much faster
    than plain decoding it was.
    """
    groups = (template, drafting, costs, verification, lenience, sampling, penalties, constraints)
    asked = options(*groups, proposer=drafting.chosen_proposer(models))
    caches = cache.settings()
    simulated = asked.simulated_acceptance is not None
    text = read_prompt(prompt.prompt_words, prompt.prompt, prompt.prompt_file)
    demo = text is None and models.model is None
    if demo or (text is None and simulated):
        text = SHIPPED_PROMPT
    if text is None:
        raise PromptError("no prompt: give one as an argument, with --prompt-file, or - for stdin")
    if not text.strip():
        raise PromptError("the prompt is empty: give some text")
    store = _store(prompt_cache.prompt_cache_file, simulated)
    pair, asked = load_drafting(
        models,
        drafting,
        caches,
        asked,
        random_weights=simulated,
        told=not (output.quiet or output.json),
    )
    from ..prepare import missing_prefix

    told = not (output.quiet or output.json or simulated)
    if told and demo:
        render.tell(f"prompt: {text}")
    elif told and (prefix := missing_prefix(pair, text, asked)):
        render.tell(f'"{prefix}" was put before the prompt, as the target\'s config.json asks')
    kept = None if store is None else store.open(pair)
    run = _generate(pair, text, asked, output, kept)
    if store is not None and kept is not None:
        store.close(kept, pair)
    if output.verbose:
        print(figures.lengths(run.changes, run.result()), file=sys.stderr)
    if run.result().finish_reason == "interrupted":
        raise KeyboardInterrupt
    if told and demo and not asked.regular:
        tell_speedup(pair, text, asked, run.result())


def _store(file: Path | None, simulated: bool) -> Store | None:
    """Raises OptionError for a file that is there and no prompt cache."""
    if file is None:
        return None
    if simulated:
        raise OptionError("--simulate-acceptance keeps no texts: leave --prompt-cache-file out")
    from .. import blas

    blas.load()
    from ..prompt_cache.store import Store

    return Store(file=file)


def _generate(
    pair: Pair, text: str, options: Options, output: Output, cache: PromptCache | None
) -> Run:
    from ..assemble import stream_generate

    with render.progress("reading the prompt") as report:
        timed: Timed = "some" if output.json else "wanted"
        run = stream_generate(pair, text, options, progress=report, timed=timed, cache=cache)
        try:
            run.read_prompt()
        except KeyboardInterrupt:
            run.interrupt()
    silent = output.json or options.simulated_acceptance is not None
    printer = None if silent else render.TextPrinter(sys.stdout, show_drafts=output.show_drafts)
    if printer is not None and output.show_drafts and not output.quiet:
        print(render.legend(sys.stdout), file=sys.stderr)
    try:
        for emission in run:
            if printer is not None:
                printer.show(emission)
    except KeyboardInterrupt:
        last = run.interrupt()
        if printer is not None:
            printer.show(last)
    if printer is not None:
        printer.finish()
    result = run.result()
    if output.json:
        render.write(sys.stdout, render.as_json(result.as_dict()))
    elif not output.quiet:
        print(figures.summary(result), file=sys.stderr)
    return run
