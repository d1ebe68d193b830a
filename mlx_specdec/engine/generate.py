"""The library's functions that generate one completion or many, at once or step by step."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import mlx.core as mx

from .. import system
from ..core.options import Options, integer
from ..core.row import Prompt, Request
from ..errors import DecodingError, OptionError, PromptError
from ..results import Result, Step
from ..types import Progress, Proposer
from .memory import LARGEST_BATCH_SIZE, BatchSize
from .pair import Pair
from .prompt_cache import PromptCache
from .request import encode, for_model
from .scheduler import Scheduler


class Run:
    """A completion that is being generated. Iterate over it for its steps; then `result`
    returns the completion. `stream_generate` creates it."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Take over a scheduler that has started its only request."""
        self._scheduler = scheduler
        self._last: Step | None = None

    def __iter__(self) -> Iterator[Step]:
        """Decode, and yield each step. A step of the prefill is empty. Raises DecodingError as
        `result` does, after a step with the text that was held back."""
        system.clear_at_end()
        while self._last is None:
            if self._scheduler.prefilling:
                self._scheduler.prefill()
                yield Step()
            else:
                [step] = self._scheduler.decode()
                if step.error is not None and step.text:
                    yield step  # the text that was held back
                yield self._take(step)

    def prefill(self) -> None:
        """Prefill the prompt now. Otherwise, the first iteration does it."""
        system.clear_at_end()
        while self._last is None and self._scheduler.prefilling:
            self._scheduler.prefill()

    @property
    def reason(self) -> str:
        """Why the draft length is what it is, in one line."""
        return self._scheduler.opener.worth.reason

    def interrupt(self) -> Step:
        """End the completion early, and return the text that was held back until now."""
        step = self._scheduler.interrupt(0)
        return Step() if step is None else self._take(step)

    def result(self) -> Result:
        """Decode to the end and return the completion. Raises DecodingError if the model's logits
        are NaN or infinite, or if no token satisfies the constraint."""
        for _ in self:
            pass
        assert self._last is not None
        if self._last.result is None:
            raise DecodingError(self._last.error)
        self._scheduler.save_costs()
        return self._last.result

    def _take(self, step: Step) -> Step:
        if step.last:
            self._last = step
        if step.error is not None:
            raise DecodingError(step.error)
        return step


def stream_generate(
    pair: Pair,
    prompt: Prompt,
    options: Options | None = None,
    *,
    proposer: Proposer | None = None,
    progress: Progress | None = None,
    timed: bool = False,
    cache: PromptCache | None = None,
) -> Run:
    """Start one completion, which is decoded as the caller iterates over it.

    Args:
        pair: The models that `load` returns.
        prompt: A string, messages, or token ids; see `generate`.
        options: The settings of the completion; None for `Options()`.
        proposer: The drafter, in place of the one that the options name.
        progress: Called with the numbers of prompt tokens that were prefilled and that there are.
        timed: Whether some rounds are timed in parts. Drafting and verifying do not overlap in such
            a round. Otherwise the statistics lack the seconds of both.
        cache: A prefix cache for the prompts of one pair. It is not used if passes over several
            tokens of the target disagree with passes over single ones.

    Returns:
        The run. Iterate over it for its `Step`s, then call its `result`.

    Raises:
        PromptError: The prompt is empty, or longer than the model can take.
        OptionError: The options do not suit the model.
        CheckpointError: The model's chat template refuses the messages or settings.
        DecodingError: While iterating; see `Run.result`.

    Example:
        run = stream_generate(pair, "def add(a, b):", Options(max_tokens=64))
        for step in run:
            print(step.text, end="", flush=True)
        print(run.result().stats.tokens_per_second)
    """
    options = options or Options()
    mx.reset_peak_memory()
    own: dict[str, Any] = {"proposer": proposer, "progress": progress, "timed": timed}
    scheduler = Scheduler(pair, (), options, BatchSize(1), cache, **own, raises=True)
    scheduler.start(Request(prompt, options))
    return Run(scheduler)


def generate(pair: Pair, prompt: Prompt, options: Options | None = None) -> Result:
    """Generate one completion, and return it when it is finished.

    Args:
        pair: The models that `load` returns.
        prompt: A string, messages or token ids. The chat template is applied to a string if the
            model has one. Messages are a list of {"role": ..., "content": ...}. Token ids are used
            as they are.
        options: The settings of the completion; None for `Options()`, which decodes greedily and
            up to 100 tokens.

    Returns:
        The completion: its `text`, its `tokens` (ids, an EOS token included), its `finish_reason`,
        and its figures in `stats`.

    Raises:
        PromptError: The prompt is empty, or longer than the model can take.
        OptionError: The options do not suit the model.
        CheckpointError: The model's chat template refuses the messages or settings.
        DecodingError: The model's logits are NaN or infinite, or no token satisfies the constraint.

    Example:
        from mlx_specdec import Options, generate, load
        pair = load("weights/py-llama", "weights/py-llama-draft")
        print(generate(pair, "def add(a, b):", Options(max_tokens=16)).text)
    """
    return stream_generate(pair, prompt, options).result()


def stream_many(
    pair: Pair,
    prompts: Iterable[Prompt | Request],
    options: Options | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
    memory_budget: int | None = None,
    cache: PromptCache | None = None,
) -> Scheduler:
    """Decode many prompts together, step by step. No completion depends on the other prompts.

    Args:
        pair: The models that `load` returns.
        prompts: Prompts as `generate` takes them, or requests, which have their own options. The
            iterator may be endless.
        options: The settings of the prompts that are no requests. None for `Options()`.
        batch_size: The maximum number of sequences in one pass of the target; "auto" for the number
            that brings the most tokens per second.
        memory_budget: The bytes for all sequences together. Sequences that do not fit wait. None
            takes the free memory of the machine except for a reserve.
        cache: A prefix cache, as in `stream_generate`. If the iterator is closed early, what is
            computed of the prompts stays there.

    Returns:
        The scheduler. Iterate over it for the steps of all prompts, one `Step` per prompt and
        round. The last step of a prompt has a `result`, or an `error` if the prompt is unusable or
        fails.

    Raises:
        OptionError: The options do not suit the model, or a number is out of range.
        CheckpointError: The model's chat template refuses the settings.
        PromptError: The prompts are one string.

    Example:
        for step in stream_many(pair, ["def add(a, b):", "def sub(a, b):"]):
            if step.result is not None:
                print(step.number, step.result.text)
    """
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
    mx.reset_peak_memory()
    requests = (one if isinstance(one, Request) else Request(one, options) for one in prompts)
    size = BatchSize(most=LARGEST_BATCH_SIZE) if batch_size == "auto" else BatchSize(batch_size)
    return Scheduler(pair, requests, options, size, cache, memory_budget=memory_budget)


def generate_many(
    pair: Pair,
    prompts: Iterable[Prompt | Request],
    options: Options | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
    memory_budget: int | None = None,
) -> list[Result]:
    """Decode many prompts together and return all completions.

    Args:
        pair, prompts, options, batch_size, memory_budget: See `stream_many`.

    Returns:
        The completions in the order of the prompts.

    Raises:
        DecodingError: A prompt has no completion; the message has its number, counted from 0.
        OptionError, CheckpointError, PromptError: See `stream_many`.

    Example:
        results = generate_many(pair, ["def add(a, b):", "def sub(a, b):"], batch_size=2)
        print([result.text for result in results])
    """
    results: dict[int, Result] = {}
    run = stream_many(pair, prompts, options, batch_size=batch_size, memory_budget=memory_budget)
    for step in run:
        if step.error is not None:
            raise DecodingError(f"prompt {step.number}: {step.error}")
        if step.result is not None:
            results[step.number] = step.result
    return [results[number] for number in sorted(results)]
