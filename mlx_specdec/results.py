"""The results of decoding on the host: a step, and a completion with its settings and figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from .errors import DAMAGED

INEXACT = "exact is impossible"
"""The beginning of the error if a model has no exact passes."""
FinishReason = Literal["eos", "length", "stop", "interrupted", "damaged", "stuck", "failed"]
STUCK = (
    "the text cannot go on as json-schema, regex or grammar demands: the model has no token for "
    "what must follow, logit-bias bans it, or the grammar is too complex; make it simpler"
)
NO_TEXT: dict[FinishReason | None, str] = {"damaged": DAMAGED, "stuck": STUCK}
"""The error messages of completions that failed, by finish reason."""


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token in the target, before temperature, penalties and filters.

    Attributes:
        token: The id of the token.
        logprob: The natural log-probability of the token.
        top: The most likely tokens of the position as (id, log-probability), the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Step:
    """The result of one round for one request. The step of a prefill is empty.

    Attributes:
        number: The number of the request, counted from 0; see `stream_many`.
        tokens: The ids of the new tokens, an EOS token included.
        drafted: The number of draft tokens, none of them after the last new token.
        accepted: How many of the new tokens, counted from the first, are accepted draft tokens.
        proposer: The name of the proposer of the draft tokens, or "".
        text: The text that became printable, without EOS token and stop strings.
        accepted_chars: How many characters of the text, counted from the first, accepted draft
            tokens completed.
        logprobs: The log-probabilities of the new tokens, if the request asks for them.
        prompt_logprobs: In the first step of a request that asks for them, the log-probabilities of
            the second and all later tokens of the prompt.
        finish_reason: Why the request has ended, or None; see `Result`.
        stop: The stop string that ended the request, or "".
        result: The completion if this is the last step of one of many requests, otherwise None.
        error: Why there is no completion if this is the last step, otherwise None.
    """

    number: int = 0
    tokens: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    proposer: str = ""
    text: str = ""
    accepted_chars: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str = ""
    result: Result | None = None
    error: str | None = None

    @property
    def last(self) -> bool:
        """Whether no other step of this request follows, for one of many requests."""
        return self.result is not None or self.error is not None


@dataclass(frozen=True)
class Labels:
    """The settings of a completion.

    Attributes:
        model, draft_model: The names that `load` was called with.
        proposer: The proposer's name, "auto" for several, or "none".
        rule: The name of the acceptance rule.
        lossy: Whether the text may differ in distribution from the target's own.
        delta, seed, num_draft, exact: See `Options`.
        prompt_tokens: The number of tokens of the prompt.
        cached_tokens: How many of them came from the prefix cache.
    """

    model: str
    draft_model: str | None
    proposer: str
    rule: str
    lossy: bool
    delta: float
    seed: int
    num_draft: int | str
    prompt_tokens: int
    cached_tokens: int = 0
    exact: bool = False


@dataclass(frozen=True)
class Seconds:
    """Wall times of one completion in seconds.

    Attributes:
        load: Time to load the pair.
        prompt: Time of the prefill, proposers included.
        prompt_draft: The share of the proposers in `prompt`.
        draft: Time of drafting. This and `verify` are extrapolated from the rounds that were timed
            in parts. `draft`, `verify` and `other` are None if no speculative round was.
        verify: Time of the target's passes after the prefill, plain steps included.
        other: The remaining time after the prefill.
        total: The total time.
    """

    load: float
    prompt: float
    prompt_draft: float
    draft: float | None
    verify: float | None
    other: float | None
    total: float

    @property
    def decoding(self) -> float:
        """The time after the prefill."""
        return self.total - self.load - self.prompt


@dataclass(frozen=True)
class SourceFigures:
    """Figures of one of several proposers: the rounds in which it drafted, its draft tokens, and
    how many of them were accepted."""

    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Statistics:
    """Figures of one completion, up to its last token.

    Attributes:
        rounds: The number of rounds, plain steps included.
        drafted: The number of draft tokens.
        accepted: The number of accepted draft tokens.
        acceptance_rate: accepted / drafted; None without draft tokens.
        tokens_per_round: Generated tokens per round; None without rounds.
        drafted_by_position, accepted_by_position: Entry i is about the i-th draft token of a round.
        by_source: Figures by proposer, if several proposed.
        target_passes: The number of target passes after the prefill. Pipelined
            decoding submits one pass more than it uses.
        timed_rounds: The number of speculative rounds that were timed in parts.
        seconds: Wall times.
        tokens_per_second: Generated tokens per second after the prefill; None if that took no time.
        peak_memory_bytes: MLX's peak since the request began, weights included.
        device: "cpu", or the name of the GPU.
        blas: The BLAS of the CPU, such as "mkl" or "accelerate".
    """

    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    tokens_per_round: float | None
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    by_source: dict[str, SourceFigures]
    target_passes: int
    timed_rounds: int
    seconds: Seconds
    tokens_per_second: float | None
    peak_memory_bytes: int
    device: str
    blas: str

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as the commands print them with --json."""
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """A finished completion.

    Attributes:
        text: The text, without EOS token and stop strings.
        tokens: The token ids, an EOS token included.
        finish_reason: "eos", "length" (`max_tokens` were generated), "stop" (a stop string), or
            "interrupted".
        labels: The settings.
        stats: Counts, rates and times.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    labels: Labels
    stats: Statistics

    def as_dict(self) -> dict[str, Any]:
        """Return the payload of `--json`."""
        labels = asdict(self.labels)
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "prompt_tokens": labels.pop("prompt_tokens"),
            "cached_tokens": labels.pop("cached_tokens"),
            "generated_tokens": len(self.tokens),
            **labels,
            "stats": self.stats.as_dict(),
        }
