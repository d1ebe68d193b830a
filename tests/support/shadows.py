"""Checks of rewinds, at twice the cost. Each context gets a shadow: a second context that gets
committed tokens only and is never rewound. The logits of both must agree whenever they have seen
the same tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.decoding.loop import Decoding
from mlx_specdec.decoding.statistics import Stopwatch
from mlx_specdec.engine.opening import Opener
from mlx_specdec.engine.request import Job
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.errors import RewindError
from mlx_specdec.interfaces import Context, Model, Scores
from mlx_specdec.interfaces.results import Cached, RoundReport
from mlx_specdec.text.vocabulary import Translation

TOLERANCE = 1e-3
HALF_TOLERANCE = 0.3
"""The largest allowed difference of log-probabilities, in float32 and in half precision. Passes
with different numbers of rows round differently."""


class CheckedContext:
    """A Context of one sequence with a shadow. Other attributes are the context's."""

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
        """Run a pass as interfaces.Context says. Raises RewindError if the shadow disagrees."""
        start = len(self._seen)
        scores = self._context.advance(tokens, proposed, taps)
        row: list[int] = tokens[0].tolist()  # type: ignore[assignment]
        self._seen += row
        self._compare_contents(scores.logits, start, len(self._seen) - proposed)
        return scores

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Rewind as interfaces.Context says. Raises RewindError if the context then holds another
        number of tokens."""
        self._context.rewind(lengths)
        del self._seen[lengths[0] :]
        if self._context.lengths != (len(self._seen),):
            raise RewindError(
                f"a context says that it holds {self._context.lengths} tokens after a rewind to "
                f"{len(self._seen)}"
            )

    def filter(self, keep: Sequence[int]) -> None:
        """Do nothing: the context holds one sequence."""

    def compare(self, committed: Sequence[int]) -> None:
        """Raise RewindError if a token that the context has seen is not the committed one."""
        for place, (token, right) in enumerate(zip(self._seen, committed, strict=False)):
            if token != right and right < self._vocabulary:
                raise RewindError(
                    f"a context has seen token {token} at place {place} where {right} is committed"
                )
        if len(self._seen) >= len(committed):
            raise RewindError(
                f"a context holds {len(self._seen)} tokens of {len(committed)} committed ones: "
                "the newest must be unseen"
            )

    def _compare_contents(self, logits: mx.array, start: int, final: int) -> None:
        """Feed the shadow up to `final` tokens, and compare the logits of the last one. logits: The
        logits of a pass that began at position `start`."""
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
    """A Model that opens checked contexts. Other attributes are the model's. translation: The
    mapping of the target's token ids to the model's, if they differ."""

    why_not_batched = "its contexts are compared one sequence at a time"

    def __init__(self, model: Model, translation: Translation | None = None) -> None:
        self._model = model
        self._feed = list if translation is None else translation.feed
        self._opened: list[CheckedContext] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def open(self, prompt: Sequence[int], cached: Cached | None = None) -> CheckedContext:
        """Open a context and its shadow. The shadow does not use cached tokens."""
        return self.open_batch([prompt], [cached])

    def open_batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Cached | None] = (None,)
    ) -> CheckedContext:
        """See `open`; there is only one prompt."""
        self._opened.append(CheckedContext(self._model, prompts[0], cached[0]))
        return self._opened[-1]

    def forget(self) -> None:
        """Forget the contexts of earlier sequences."""
        self._opened = []

    def on_round(self, report: RoundReport) -> None:
        """Compare the contexts with the committed tokens, unless nothing was rewound."""
        if not report.pipelined and not report.ended:
            self.compare(self._feed(report.sequences[0].committed))

    def compare(self, committed: Sequence[int]) -> None:
        """Raise RewindError if a context has seen other tokens than the committed ones."""
        for context in self._opened:
            context.compare(committed)


def check_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every scheduler compare the contexts of its models after every round."""
    begin, open_contexts, receive = Scheduler.__post_init__, Opener.open, Scheduler.on_round

    def begin_checked(self: Scheduler) -> None:
        pair = self.pair
        draft: Any = pair.draft and CheckedModel(pair.draft, pair.translation)
        target: Any = CheckedModel(pair.target)
        self.pair = replace(pair, target=target, draft=draft)
        begin(self)

    def open_alone(self: Opener, jobs: Sequence[Job], watch: Stopwatch) -> Decoding:
        for model in checked(self):
            model.forget()
        return open_contexts(self, jobs, watch)

    def receive_and_compare(self: Scheduler, report: RoundReport) -> None:
        receive(self, report)
        for model in checked(self):
            model.on_round(report)

    def checked(holder: Any) -> list[CheckedModel]:
        models = (holder.pair.target, holder.pair.draft)
        return [model for model in models if isinstance(model, CheckedModel)]

    monkeypatch.setattr(Scheduler, "__post_init__", begin_checked)
    monkeypatch.setattr(Opener, "open", open_alone)
    monkeypatch.setattr(Scheduler, "on_round", receive_and_compare)


def _log_probabilities(logits: mx.array) -> mx.array:
    rows = logits.astype(mx.float32)
    return mx.maximum(rows - mx.logsumexp(rows, axis=-1, keepdims=True), -60.0)
