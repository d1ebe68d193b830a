"""The results of requests: parts of completions, completions, and why there is none."""

from dataclasses import asdict, dataclass
from typing import Any

from ..decoding.sequence import Emission, FinishReason, TokenLogprob
from ..decoding.statistics import Statistics
from ..errors import DAMAGED

STUCK = (
    "the text cannot go on as json-schema, regex or grammar demands: the model has no token for "
    "what must follow, logit-bias bans it, or the grammar is too complex; make it simpler"
)
NO_TEXT: dict[FinishReason | None, str] = {"damaged": DAMAGED, "stuck": STUCK}
"""The error messages of completions that failed, by finish reason."""


@dataclass(frozen=True)
class Labels:
    """The settings of a completion.

    Attributes:
        model, draft_model: The names that `load` was called with.
        proposer: The drafter's name, "auto" for several, or "none".
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


@dataclass(frozen=True)
class Part:
    """The output of one step for one of many prompts; see `stream_many`.

    Attributes:
        number: The number of the prompt, counted from 0.
        emission: The tokens and the text of the step.
        result: The finished completion if this is its last part, otherwise None.
        error: Why there is no completion if this is the last part, otherwise None.
        drafted: The number of draft tokens of the step.
        accepted: How many of them were accepted.
        prompt_logprobs: In the first part of a request that asks for them, the log-probabilities
            of the second and all later tokens of the prompt.
    """

    number: int
    emission: Emission
    result: Result | None = None
    error: str | None = None
    drafted: int = 0
    accepted: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def last(self) -> bool:
        """Whether no other part of this prompt follows."""
        return self.result is not None or self.error is not None
