"""What requests become, from the Steps of their completions, which must add up."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mlx_specdec import DecodingError, Request, Result, stream_generate, stream_many


@dataclass
class Outcome:
    """A completion, or the error in its place. logprobs: of its tokens, each with the likeliest
    ones of its position, sorted by id."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    error: str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    result: Any = None

    @property
    def ended(self) -> bool:
        return self.reason is not None or self.error is not None

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal, however the completion was decoded."""
        return (self.error,) if self.error else (tuple(self.tokens), self.text, self.reason)

    def take(self, step: Any) -> None:
        """Add a step, and check the last one."""
        assert not self.ended, "a step follows the last one"
        assert 0 <= step.accepted_chars <= len(step.text)
        assert 0 <= step.accepted <= min(step.drafted, len(step.tokens))
        self.tokens += step.tokens
        self.text += step.text
        for entry in step.logprobs:
            self.logprobs.append({entry.token: entry.logprob, **dict(entry.top)})
        self.reason, self.error, self.result = step.finish_reason, step.error, step.result
        assert step.last == self.ended

    def finish(self, result: Result) -> None:
        """Check that the steps add up to the result."""
        assert (tuple(self.tokens), self.text, self.reason) == (
            result.tokens,
            result.text,
            result.finish_reason,
        )
        stats = result.stats
        assert stats.accepted <= stats.drafted and stats.rounds <= len(self.tokens) + 1
        assert stats.accepted + stats.rounds >= len(self.tokens)
        assert sum(stats.accepted_by_position) == stats.accepted
        assert sum(stats.drafted_by_position) == stats.drafted


def alone(pair: Any, request: Request, **how: Any) -> Outcome:
    """Decode one request with stream_generate."""
    outcome = Outcome()
    run = stream_generate(pair, request.prompt, request.options, **how)
    try:
        for step in shim(run):
            outcome.take(step)
        outcome.result = run.result()
    except DecodingError as problem:
        return Outcome(error=str(problem))
    outcome.finish(outcome.result)
    return outcome


def together(pair: Any, requests: Iterable[Request], **how: Any) -> list[Outcome]:
    """Decode requests with stream_many."""
    outcomes: dict[int, Outcome] = {}
    for step in shim(stream_many(pair, requests, **how)):
        outcome = outcomes.setdefault(step.number, Outcome())
        outcome.take(step)
        if step.result is not None:
            outcome.finish(step.result)
    assert all(outcome.ended for outcome in outcomes.values())
    return [outcomes[number] for number in sorted(outcomes)]


# SHIM until Step lands
from types import SimpleNamespace  # noqa
def shim(run):  # noqa
    for part in run:
        e = getattr(part, "emission", part)
        chars = sum(len(p.text) for p in e.pieces if p.drafted)
        yield SimpleNamespace(
            number=getattr(part, "number", 0), tokens=e.tokens, text=e.text, accepted_chars=chars,
            logprobs=e.logprobs, finish_reason=e.finish_reason, stop=e.stop,
            drafted=getattr(part, "drafted", 99), accepted=getattr(part, "accepted", e.drafted),
            result=getattr(part, "result", None), error=getattr(part, "error", None),
            last=getattr(part, "last", e.finish_reason is not None),
            prompt_logprobs=getattr(part, "prompt_logprobs", ()))
