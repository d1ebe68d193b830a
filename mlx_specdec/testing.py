"""For debugging, at twice the cost: each context has a shadow that reads the committed tokens alone
and is never rewound. Where both have seen the same text, their logits must agree."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .errors import RewindError
from .interfaces import Context, Model, Scores
from .interfaces.results import Cached, RoundReport
from .text.vocabulary import Translation

TOLERANCE = 1e-3
HALF_TOLERANCE = 0.3
"""Of log-probabilities: passes of other widths round differently, and half precision a lot."""


class CheckedContext:
    """A Context of one sequence and its shadow; what is not here is the context's."""

    def __init__(self, model: Model, prompt: Sequence[int], cached: Cached | None = None) -> None:
        self._vocabulary = model.vocabulary
        self._context: Context = model.open(prompt, cached)
        self._shadow: Context = model.open(prompt)
        self._seen: list[int] = list(prompt[: self._context.lengths[0]])
        if self._seen:
            self._shadow.advance(mx.array([self._seen], dtype=mx.int32))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """As contracts.Context says. Raises RewindError where the shadow disagrees."""
        start = len(self._seen)
        scores = self._context.advance(tokens, proposed, taps)
        row: list[int] = tokens[0].tolist()  # type: ignore[assignment]
        self._seen += row
        self._compare_contents(scores.logits, start, len(self._seen) - proposed)
        return scores

    def rewind(self, lengths: tuple[int, ...]) -> int:
        """See Context. Raises RewindError if the context does not hold as many tokens."""
        passes = self._context.rewind(lengths)
        del self._seen[lengths[0] :]
        if self._context.lengths != (len(self._seen),):
            raise RewindError(
                f"a context says that it holds {self._context.lengths} tokens after a rewind to "
                f"{len(self._seen)}"
            )
        return passes

    def filter(self, keep: Sequence[int]) -> None:
        """Nothing to do: it holds one sequence."""

    def compare(self, committed: Sequence[int]) -> None:
        """Raises RewindError for the first token seen that is not the committed one."""
        for place, (seen, right) in enumerate(zip(self._seen, committed, strict=False)):
            if seen != right and right < self._vocabulary:
                raise RewindError(
                    f"a context has seen token {seen} at place {place} where {right} is committed"
                )
        if len(self._seen) >= len(committed):
            raise RewindError(
                f"a context holds {len(self._seen)} tokens of {len(committed)} committed ones: "
                "the newest must be unseen"
            )

    def _compare_contents(self, logits: mx.array, start: int, final: int) -> None:
        shadowed = self._shadow.lengths[0]
        if final <= max(shadowed, start):
            return
        fed = mx.array([self._seen[shadowed:final]], dtype=mx.int32)
        expected = _log_probabilities(self._shadow.advance(fed).logits[0, -1])
        actual = _log_probabilities(logits[0, final - start - 1])
        difference = float(mx.max(mx.abs(expected - actual)).item())  # type: ignore[arg-type]
        limit = TOLERANCE if logits.dtype == mx.float32 else HALF_TOLERANCE
        if not difference <= limit:
            raise RewindError(
                f"after {final} tokens a rewound context differs from one that was never rewound: "
                f"log-probabilities by {difference:.3g}"
            )


class CheckedModel:
    """A Model whose contexts check themselves; all else is the model's. As a RoundListener it
    compares them with the committed tokens after every round that rewinds."""

    batches = False
    why_not_batched = "its contexts are compared one sequence at a time"

    def __init__(self, model: Model, translation: Translation | None = None) -> None:
        self._model = model
        self._feed = list if translation is None else translation.feed
        self._opened: list[CheckedContext] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def open(self, prompt: Sequence[int], cached: Cached | None = None) -> CheckedContext:
        """Open a context and its shadow, which computes even what is cached."""
        context = CheckedContext(self._model, prompt, cached)
        self._opened.append(context)
        return context

    def forget(self) -> None:
        """Compare no more with the contexts of an earlier text."""
        self._opened = []

    def on_round(self, report: RoundReport) -> None:
        """As RoundListener says."""
        if not report.pipelined and not report.ended:
            self.compare(self._feed(report.sequences[0].committed))

    def compare(self, committed: Sequence[int]) -> None:
        """Raises RewindError where a context has seen other tokens than the committed ones."""
        for context in self._opened:
            context.compare(committed)


def _log_probabilities(logits: mx.array) -> mx.array:
    rows = logits.astype(mx.float32)
    return mx.maximum(rows - mx.logsumexp(rows, axis=-1, keepdims=True), -60.0)
