"""The generate command: flags and prompt in, streamed text and statistics out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..cache_settings import CacheSettings
from ..checkpoints.disk.sizes import show
from ..errors import OptionError, PromptError
from ..options import SELF, Options, proposers
from . import figures, render
from .demo import tell_speedup
from .flags import Flags, command, flag, options
from .groups import (
    ChatTemplate,
    Constraints,
    CostCache,
    Json,
    KVCache,
    Lenience,
    Models,
    Sampling,
    Verification,
)
from .pairs import SHIPPED_PROMPT, load_pair, named
from .prompt import read_prompt

if TYPE_CHECKING:
    from ..assemble import Pair
    from ..decoding.run import Run
    from ..decoding.stopwatch import Timed
    from ..prompt_cache.cache import PromptCache
    from ..prompt_cache.store import Store

SEARCHING = ("auto", "ngram")
"""Proposers that look things up."""
DRAFTLESS = ("ngram", "medusa", "none")
"""Proposers for which no draft is loaded."""


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
class Drafting(Flags):
    """Who drafts, and how much."""

    panel = "Drafting"
    proposer: str | None = flag(
        None,
        "The drafter: a draft model (draft), n-gram lookup in the prompt and the text (ngram), "
        "Medusa heads (medusa), a drafter on the target's hidden states by its kind (dspark, "
        "dflash2, dflash, peagle, eagle3, mtp, eagle, gemma4_assistant), lookup before one of the "
        "others (auto), or none.",
        metavar="NAME",
        autocompletion=proposers,
    )
    num_draft: str = flag(
        "auto",
        "The number of draft tokens in a round; auto learns it on this machine.",
        "--num-draft-tokens",
        metavar="N|auto",
    )
    speculate: int | None = flag(
        None, "The same number, drafted by n-gram lookup where nothing else is named."
    )
    ngram_min: int | None = flag(
        None,
        "The shortest match that lookup trusts, in tokens.",
        show_default="2, or 4 before another drafter",
    )
    ngram_choice: Literal["recent", "frequent"] = flag(
        "recent", "The continuation that lookup takes where there are several."
    )
    lookup_file: list[Path] | None = flag(
        None,
        "A text that lookup searches as well; the flag may be repeated.",
        metavar="FILE",
        exists=True,
        dir_okay=False,
    )
    regular_decode: bool = flag(False, "Decode plainly, without speculation.")

    @property
    def searches(self) -> bool:
        """Whether documents are searched."""
        return bool(self.lookup_file) and not self.regular_decode

    def chosen_proposer(self, models: Models) -> str | None:
        """The drafter that the flags ask for together. Raises OptionError."""
        proposer: str | None = self.proposer
        if self.lookup_file and proposer is None:
            proposer = "auto"
        elif self.speculate is not None and self.guessed(models):
            proposer = "ngram"
        if self.searches and proposer not in SEARCHING:
            raise OptionError("--lookup-file is for lookup: give --proposer ngram or auto")
        return proposer

    def guessed(self, models: Models) -> bool:
        """Whether neither a drafter nor a draft model was named."""
        return self.proposer is None and models.draft_model is None

    def for_options(self) -> dict[str, Any]:
        number = self.num_draft if self.speculate is None else str(self.speculate)
        return {
            **super().for_options(),
            "regular": self.regular_decode,
            "num_draft": count_or_auto("--num-draft", number),
        }


@dataclass(frozen=True)
class Penalties(Flags):
    """What changes the chances of single tokens, and what ends the text."""

    panel = "Sampling"
    xtc_probability: float = flag(
        0.0, "The share of positions whose top choices are excluded; 0 excludes none."
    )
    xtc_threshold: float = flag(
        0.1, "The probability above which all tokens but the least likely one are top choices."
    )
    repetition_penalty: float = flag(1.0, "The factor against earlier tokens; 1 is off.")
    presence_penalty: float = flag(0.0, "The amount subtracted from the logit of earlier tokens.")
    frequency_penalty: float = flag(0.0, "The amount subtracted for each time a token occurred.")
    logit_bias: list[str] | None = flag(
        None,
        "A value to add to the logit of one token id; the flag may be repeated.",
        metavar="ID=VALUE",
    )
    stop: list[str] | None = flag(
        None, "A string before which the text ends; the flag may be repeated."
    )
    extra_eos_token: list[str] | None = flag(
        None, "A token, or its id, that ends the text as well; the flag may be repeated."
    )

    def for_options(self) -> dict[str, Any]:
        return {
            **super().for_options(),
            "logit_bias": _biases(self.logit_bias or ()),
            "stop": tuple(self.stop or ()),
            "extra_eos_token": tuple(self.extra_eos_token or ()),
        }


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


def load_drafting(
    models: Models,
    drafting: Drafting,
    caches: CacheSettings,
    asked: Options,
    *,
    random_weights: bool = False,
    told: bool = True,
) -> tuple[Pair, Options]:
    """Load what drafts and what it drafts for, documents included, and settle who that is.

    told: say what a draft takes that nobody named. Raises as `pairs.load_pair` and
    `assemble.with_documents` do."""
    model, draft_model = named(models)
    if asked.regular or asked.proposer in DRAFTLESS:
        draft_model = None
    pair = load_pair(
        model, draft_model, caches=caches, random_weights=random_weights, **models.loading()
    )
    if drafting.searches:
        from ..assemble import with_documents

        with render.progress("indexing what to look up") as report:
            pair = with_documents(pair, drafting.lookup_file or (), progress=report)
    if draft_model == SELF and pair.draft is not None and told:
        render.tell(f"drafting with the target's own layers: {show(pair.draft_bytes)} beside it")
    if pair.heads is not None and drafting.guessed(models) and not drafting.lookup_file:
        asked = replace(asked, proposer=None)
    return pair, asked


def count_or_auto(name: str, text: str) -> int | Literal["auto"]:
    """What a flag says that takes a number or auto. Raises OptionError."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{name} must be a number or auto, not {text!r}") from None


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
