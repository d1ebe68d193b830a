"""The library's functions that generate text: one text or many, whole or step by step."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import mlx.core as mx

from .. import process
from ..decoding.sequence import Emission
from ..decoding.statistics import Timed
from ..draft_length.length import Change, DraftLength
from ..errors import DecodingError, OptionError, PromptError
from ..interfaces import Progress, Proposer, Rule
from ..options import Options
from ..sampling.settings import integer
from .memory import AutoBatchSize, BatchSize
from .pair import Pair
from .prompt_cache import PromptCache
from .request import Overrides, Part, Prompt, Request, Result, encode, for_model
from .scheduler import Scheduler


class Run:
    """One text in the making: iterate to decode; `result` decodes what is left and returns it all.
    scheduler: with this text as its only request, which has been started."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._last: Part | None = None
        self._saved = False

    def __iter__(self) -> Iterator[Emission]:
        """The emissions still to come, one a step; those of the prompt's steps are empty."""
        process.clear_at_end()
        while self._last is None:
            if self._scheduler.reading:
                self._scheduler.read()
                yield Emission((), ())
            else:
                [part] = self._scheduler.decode()
                yield self._take(part)

    def read_prompt(self) -> None:
        process.clear_at_end()
        while self._last is None and self._scheduler.reading:
            self._scheduler.read()

    @property
    def changes(self) -> Sequence[Change]:
        return self._scheduler.changes

    def interrupt(self) -> Emission:
        part = self._scheduler.interrupt(0)
        return Emission((), ()) if part is None else self._take(part)

    def result(self) -> Result:
        """Decode to the end and return everything. Raises DecodingError where there is no text."""
        for _ in self:
            pass
        assert self._last is not None
        if self._last.result is None:
            raise DecodingError(self._last.error)
        if not self._saved:
            self._saved = True
            self._scheduler.save_costs()
        return self._last.result

    def _take(self, part: Part) -> Emission:
        if part.last:
            self._last = part
        if part.error is not None:
            raise DecodingError(part.error)
        return part.emission


def stream_generate(
    pair: Pair,
    prompt: Prompt,
    options: Options | None = None,
    *,
    proposer: Proposer | None = None,
    rule: Rule | None = None,
    draft_length: DraftLength | None = None,
    progress: Progress | None = None,
    timed: Timed = "none",
    cache: PromptCache | None = None,
) -> Run:
    """Start one text: iterate over the returned Run for its emissions, then call its `result`.

    prompt: text, messages for the chat template, or token ids as they are. proposer, rule,
    draft_length: used in place of what the options name. progress: of reading the prompt. timed:
    which rounds are timed in parts, as decoding.statistics.Timed says; it costs overlap, and
    the statistics have no seconds of drafting and verifying without it. cache: what was computed of
    earlier texts is not computed again; not for a target whose rows disagree, see models.base.
    Raises PromptError, OptionError."""
    options = options or Options()
    mx.reset_peak_memory()
    overrides = Overrides(proposer, rule, draft_length, timed, progress)
    scheduler = Scheduler(pair, (), options, BatchSize(1), cache, overrides=overrides, raises=True)
    scheduler.start(Request(prompt, options))
    return Run(scheduler)


def generate(pair: Pair, prompt: Prompt, options: Options | None = None) -> Result:
    return stream_generate(pair, prompt, options).result()


def stream_many(
    pair: Pair,
    prompts: Iterable[Prompt | Request],
    options: Options | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
    memory_budget: int | None = None,
) -> Scheduler:
    """Decode many prompts, up to `batch_size` of them in one pass of the target; "auto" takes what
    brings most tokens a second.

    prompts: may be an endless iterator; a Request's options have the proposer and rule of
    `options`, whose draft length they limit. A completion is what its prompt becomes alone.
    memory_budget: bytes for all texts together; texts that do not fit wait, and one that can never
    fit gives a part with an error. None leaves the machine a reserve. Raises OptionError,
    CheckpointError for a chat template that refuses settings, and PromptError for a string."""
    options = options or Options()
    for_model(pair, options)
    if options.system_prompt is not None or options.chat_template_config:
        encode(pair, "a", options)  # templates refuse such settings whatever the prompt
    if batch_size != "auto" and integer("batch-size", batch_size) < 1:
        raise OptionError(f"batch-size must be 1 or more, not {batch_size}")
    if memory_budget is not None and integer("memory-budget", memory_budget) < 1:
        raise OptionError(f"memory-budget must be 1 byte or more, not {memory_budget}")
    if isinstance(prompts, str):
        raise PromptError("prompts must be a list: put the text into one")
    if options.simulated_acceptance is not None:
        raise OptionError("simulate-acceptance measures one text: leave it out for many")
    mx.reset_peak_memory()
    requests = (
        prompt if isinstance(prompt, Request) else Request(prompt, options) for prompt in prompts
    )
    size = AutoBatchSize() if batch_size == "auto" else BatchSize(batch_size)
    return Scheduler(pair, requests, options, size, memory_budget=memory_budget)


def generate_many(
    pair: Pair,
    prompts: Iterable[Prompt | Request],
    options: Options | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
    memory_budget: int | None = None,
) -> list[Result]:
    """Return all completions in the order of their prompts; see `stream_many`.

    Raises DecodingError with the number of the first prompt that has none."""
    results: dict[int, Result] = {}
    run = stream_many(pair, prompts, options, batch_size=batch_size, memory_budget=memory_budget)
    for part in run:
        if part.error is not None:
            raise DecodingError(f"prompt {part.number}: {part.error}")
        if part.result is not None:
            results[part.number] = part.result
    return [results[number] for number in sorted(results)]
