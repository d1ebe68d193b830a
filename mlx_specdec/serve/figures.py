"""The choices of an answer, and the figures over them: tokens as OpenAI counts them, times as
llama.cpp, drafts as vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

from ..decoding.run import Result
from ..decoding.stop_criteria import Emission, TokenLogprob
from ..proposers.given import PREDICTION

Told = dict[str, Any]
REASONS = {"eos": "stop", "stop": "stop"}
"""How ends are called on the wire; every other one is that of a text that was cut."""


@dataclass
class Choice:
    """One answer in the making. stop: the stop string that ended it, "" where none did. result:
    once it has ended by itself."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    reason: str | None = None
    stop: str = ""
    result: Result | None = None

    def take(self, emission: Emission, result: Result | None) -> None:
        """What a step gave."""
        self.texts.append(emission.text)
        self.logprobs += emission.logprobs
        self.tokens += len(emission.tokens)
        self.stop = emission.stop
        self.result = result
        if result is not None:
            self.reason = REASONS.get(result.finish_reason, "length")

    def cut(self) -> None:
        """No more comes, whatever was to come."""
        self.reason = self.reason or "length"


def usage(choices: Sequence[Choice], prompt_tokens: int) -> Told:
    """Tokens of prompts and answers."""
    generated = sum(each.tokens for each in choices)
    sources = [each.result.stats.by_source for each in choices if each.result is not None]
    predicted = [each[PREDICTION] for each in sources if PREDICTION in each]
    accepted = sum(each.accepted for each in predicted)
    cached = cached_tokens(choices, prompt_tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(each.drafted for each in predicted) - accepted,
        },
    }


def cached_tokens(choices: Sequence[Choice], prompt_tokens: int) -> int:
    """Tokens of prompts that were not read again. prompt_tokens: each prompt's counted once, of
    however many choices it is."""
    labels = [each.result.labels for each in choices if each.result is not None]
    read_by_choices = sum(each.prompt_tokens for each in labels)
    cached = sum(each.cached_tokens for each in labels)
    return cached * prompt_tokens // read_by_choices if read_by_choices else 0


def timings(choices: Sequence[Choice]) -> dict[str, Told]:
    """What reading and writing took, and what drafts brought, under llama.cpp's names; nothing
    where no choice has ended by itself."""
    results = [each.result for each in choices if each.result is not None]
    if not results:
        return {}
    prompt_ms = 1000 * max(each.stats.seconds.prompt for each in results)
    predicted_ms = 1000 * max(each.stats.seconds.decoding for each in results)
    cache_n = sum(each.labels.cached_tokens for each in results)
    prompt_n = sum(each.labels.prompt_tokens for each in results) - cache_n
    predicted_n = sum(len(each.tokens) for each in results)
    told = {
        "cache_n": cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(1000 * prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": _ratio(predicted_ms, predicted_n),
        "predicted_per_second": _ratio(1000 * predicted_n, predicted_ms),
    }
    if any(each.labels.proposer != "none" for each in results):
        told["draft_n"] = sum(each.stats.drafted for each in results)
        told["draft_n_accepted"] = sum(each.stats.accepted for each in results)
    return {"timings": told}


def speculative_decoding(choices: Sequence[Choice]) -> dict[str, Told]:
    """What drafts brought, under vLLM's names; nothing where no choice had any. Entry i of the
    histogram counts the rounds with drafts of which i were accepted."""
    stats = [each.result.stats for each in choices if each.result is not None]
    drafted = _sums(each.drafted_by_position for each in stats)
    if not drafted:
        return {}
    accepted = _sums(each.accepted_by_position for each in stats)
    # Of so many rounds, the first i drafts were accepted.
    reached = [drafted[0], *accepted, 0]
    steps, kept, proposed = drafted[0], sum(accepted), sum(drafted)
    told = {
        "mean_acceptance_length": round(1 + kept / steps, 4),
        "draft_acceptance_rate": round(kept / proposed, 4),
        "acceptance_histogram": [here - further for here, further in pairwise(reached)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": kept,
        "num_draft_tokens": proposed,
        "num_spec_tokens": len(drafted),
    }
    return {"metrics": {"speculative_decoding": told}}


def _sums(each: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*each, fillvalue=0)]


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0
