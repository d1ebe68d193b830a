"""What requests become: their Steps, which must add up to the completion."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mlx_specdec import DecodingError, Request, Result, Step, stream_generate, stream_many


@dataclass
class Outcome:
    """A completion, or an error in its place.

    Attributes:
        reason: Why the completion ended.
        logprobs: For each token, the log-probabilities of the token and of the likeliest ones.
        drafted, accepted: The sums of the steps.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    error: str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    result: Any = None

    @property
    def ended(self) -> bool:
        return self.reason is not None or self.error is not None

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal, however the completion was decoded."""
        return (self.error,) if self.error else (tuple(self.tokens), self.text, self.reason)

    def take(self, step: Step) -> None:
        """Add a step."""
        assert not self.ended, "a step follows the last one"
        assert 0 <= step.accepted_chars <= len(step.text)
        assert 0 <= step.accepted <= min(step.drafted, len(step.tokens))
        assert step.accepted or not step.accepted_chars
        assert step.drafted <= len(step.tokens) or step.finish_reason is None
        self.tokens += step.tokens
        self.text += step.text
        self.drafted, self.accepted = self.drafted + step.drafted, self.accepted + step.accepted
        for entry in step.logprobs:
            self.logprobs.append({entry.token: entry.logprob, **dict(entry.top)})
        self.reason, self.error = step.finish_reason, step.error

    def finish(self, result: Result) -> None:
        """Check that the steps add up to the completion."""
        self.result, stats = result, result.stats
        assert (tuple(self.tokens), self.text) == (result.tokens, result.text)
        assert (self.reason, self.drafted) == (result.finish_reason, stats.drafted)
        assert self.accepted == stats.accepted == sum(stats.accepted_by_position)
        assert stats.drafted == sum(stats.drafted_by_position)
        assert stats.rounds - 1 <= len(self.tokens) <= stats.accepted + stats.rounds


def alone(pair: Any, request: Request, **how: Any) -> Outcome:
    """Decode one request with stream_generate."""
    outcome, run = Outcome(), stream_generate(pair, request.prompt, request.options, **how)
    try:
        for step in run:
            outcome.take(step)
    except DecodingError as problem:
        return Outcome(error=str(problem))
    outcome.finish(run.result())
    return outcome


def together(pair: Any, requests: Iterable[Any], options: Any = None, **how: Any) -> list[Outcome]:
    """Decode requests with stream_many."""
    outcomes: dict[int, Outcome] = {}
    for step in stream_many(pair, requests, options, **how):
        outcome = outcomes.setdefault(step.number, Outcome())
        outcome.take(step)
        assert step.last == outcome.ended
        if step.result is not None:
            outcome.finish(step.result)
    assert all(outcome.ended for outcome in outcomes.values())
    return [outcomes[number] for number in sorted(outcomes)]
