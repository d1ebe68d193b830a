"""Many prompts decoded together, from a list or one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import mlx.core as mx

from ..decoding.run import Result
from ..errors import DecodingError, OptionError, PromptError
from ..options import Options
from ..sampling.settings import integer
from .jobs import Part as Part
from .jobs import Prompt
from .jobs import Request as Request
from .memory import AutoBatchSize, FixedBatchSize
from .pair import Pair
from .prepare import checked_options, encode, for_model
from .run import ManyRun as ManyRun


def stream_many(
    pair: Pair,
    prompts: Iterable[Prompt | Request],
    options: Options | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
    memory_budget: int | None = None,
) -> ManyRun:
    """Decode many prompts, up to `batch_size` of them in one pass of the target; "auto" takes what
    brings most tokens a second.

    prompts: may be an endless iterator; a Request has options of its own, of which proposer and
    rule must be those of `options`; its draft length limits that of `options`, which is one number
    for all. A completion is what its prompt becomes alone.
    memory_budget: bytes for all texts together, in addition to the models; texts that do not fit
    wait, and one that can never fit gives a part with an error. None leaves the machine a reserve.
    Where the model cannot take several sequences, they are decoded one after the other.
    Raises OptionError, CheckpointError for a chat template that refuses settings for it, and
    PromptError for anything but a list or an iterator of prompts.
    """
    options = checked_options(options)
    for_model(pair, options)
    if options.system_prompt is not None or options.chat_template_config:
        encode(pair, "a", options)  # templates refuse such settings whatever the prompt
    if batch_size != "auto" and integer("batch-size", batch_size) < 1:
        raise OptionError(f"batch-size must be 1 or more, not {batch_size}")
    if memory_budget is not None and integer("memory-budget", memory_budget) < 1:
        raise OptionError(f"memory-budget must be 1 byte or more, not {memory_budget}")
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise PromptError("prompts must be a list: put the text into one")
    if options.simulated_acceptance is not None:
        raise OptionError("simulate-acceptance measures one text: leave it out for many")
    mx.reset_peak_memory()
    requests = (
        prompt if isinstance(prompt, Request) else Request(prompt, options) for prompt in prompts
    )
    size = AutoBatchSize() if batch_size == "auto" else FixedBatchSize(batch_size)
    return ManyRun(pair, requests, options, size, memory_budget=memory_budget)


def generate_many(
    pair: Pair,
    prompts: Iterable[Prompt | Request],
    options: Options | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
    memory_budget: int | None = None,
) -> list[Result]:
    """All completions in the order of their prompts; see `stream_many`.

    Raises DecodingError with the number of the first prompt that has none.
    """
    results: dict[int, Result] = {}
    run = stream_many(pair, prompts, options, batch_size=batch_size, memory_budget=memory_budget)
    for part in run:
        if part.error is not None:
            raise DecodingError(f"prompt {part.number}: {part.error}")
        if part.result is not None:
            results[part.number] = part.result
    return [results[number] for number in sorted(results)]
