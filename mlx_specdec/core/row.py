"""A request and the row that it is while it is decoded."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..largest import indices_of_largest
from ..results import FinishReason, Labels, Step, TokenLogprob
from ..text.chat import Messages
from ..text.stream import StopStrings, TextStream
from ..text.thoughts import Thoughts
from ..types import Noise
from .distribution import Distribution
from .noise import SilentNoise
from .options import Options
from .statistics import Timed

Prompt = str | Sequence[int] | Messages
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A prompt with options of its own, for `stream_many` and `generate_many`.

    Attributes:
        prompt: A string, messages, or token ids; see `generate`.
        options: The settings of this completion.
        prediction: Token ids that the completion may turn out to have. They are drafted if
            requests come one by one.
        top_logprobs: The number of most likely tokens that each step lists with their
            log-probabilities; None lists nothing.
        shown: The text of special tokens that are printed, by id.
        ignore_eos: Whether no token ends the completion.
        tenant: Whose earlier completions may be drafted from.
        answers: Whether the completion is an answer in a chat, whose first blank is not printed.
        thoughts: The thoughts before the first token and their budget, or None without thoughts.
        scores_prompt: Whether the first step has the log-probabilities of the prompt's tokens, for
            a decoder-only target. Such a request shares no pass, so that they are always the same.
        open_end: Whether the completion ends if the model does not continue a text that the grammar
            of the options accepts, although the grammar allows more text.
        pair: The models, if `engine.request.prepared` has returned the prompt, the models and the
            options, and the request fits into memory. None lets the scheduler do both.
    """

    prompt: Prompt
    options: Options
    prediction: tuple[int, ...] = ()
    top_logprobs: int | None = None
    shown: Mapping[int, str] = field(default_factory=dict)
    ignore_eos: bool = False
    tenant: str = ""
    answers: bool = False
    thoughts: Thoughts | None = None
    scores_prompt: bool = False
    open_end: bool = False
    pair: Any = None


def token_logprobs(
    logits: mx.array, tokens: Sequence[int], top: int, vocabulary: int
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of the tokens that one pass gave a row. Blocks.

    Args:
        logits: (m, width); entry i predicts token i.
        tokens: At most m token ids.
        top: How many of the most likely tokens to list.
        vocabulary: Number of token ids; further columns of `logits` are padding."""
    rows = logits[: len(tokens), :vocabulary].astype(mx.float32)
    rows = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    best = indices_of_largest(rows, min(max(top, 1), vocabulary))[:, :top]
    ids = mx.concatenate([mx.array(list(tokens))[:, None], best.astype(mx.int32)], axis=-1)
    listed: Any = ids.tolist()
    logprobs: Any = mx.take_along_axis(rows, ids, axis=-1).tolist()
    found = []
    for row in zip(listed, logprobs, strict=True):
        (token, logprob), *others = zip(*row, strict=True)
        others.sort(key=lambda pair: -pair[1])
        found.append(TokenLogprob(token, logprob, tuple(others)))
    return tuple(found)


@dataclass(eq=False, kw_only=True)
class Row:
    """One request while it is decoded. It has all that belongs to this request alone.

    Attributes:
        number: The number of the request.
        options: The options of the request, with defaults that depend on the model.
        prompt: The token ids of the prompt.
        committed: All committed tokens: those before the first generated one, and the completion.
        distribution: The target's distribution.
        random: The source of the row's noise.
        eos: Ids of the tokens that end the row.
        left: How many tokens may still be emitted.
        stream, stops: The text of the tokens, and the stop strings in it.
        key: Equal for rows that may share passes.
        alike: Equal for rows whose prompts may be prefilled together.
        most_drafted: The largest number of draft tokens of the row in a round.
        prediction: Token ids that the completion may turn out to have.
        labels: The settings of the completion.
        to_prefill: The tokens that are not prefilled yet.
        seen: The committed tokens that the newest pass of the target processed.
        processed: How many committed tokens the target has processed.
        state: The state of this row in each proposer, by the proposer's name.
        tokens, text: The emitted tokens, and their printable text.
        prompt_logprobs: The log-probabilities of prompt tokens that no step has reported yet.
        rounds: The steps of the row, and the times of their rounds.
        began, prefilled: The times on the clock, in seconds, when the prefill began and ended.
        drafting: The seconds that the proposer took in the prefill.
        behind: An earlier row with a common prefix, for whose prefill this row waits.
        problem: The exception that ended this row alone, or None.
        ended: Whether the row has a finish reason."""

    number: int
    request: Request
    options: Options
    prompt: Sequence[int]
    committed: list[int]
    distribution: Distribution
    random: SilentNoise
    eos: Collection[int]
    left: int
    stream: TextStream
    stops: StopStrings
    key: tuple[object, ...]
    alike: object
    most_drafted: int
    prediction: list[int]
    labels: Labels
    to_prefill: Sequence[int] = ()
    seen: Sequence[int] = ()
    processed: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    rounds: list[tuple[Step, Timed]] = field(default_factory=list)
    began: float = 0.0
    prefilled: float = 0.0
    drafting: float = 0.0
    behind: Row | None = None
    problem: Exception | None = None
    ended: bool = False
    _reason: FinishReason | None = field(default=None, init=False)

    @property
    def position(self) -> int:
        """Output position of the next token: the number of generated tokens."""
        return len(self.committed) - self.distribution.prefix_length

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted; 0 after the end."""
        return 0 if self.ended else self.left

    @cached_property
    def drafted_from(self) -> Distribution:
        """The distribution of draft tokens in a proposer: the target's settings without a
        constraint, since q must be filtered like p."""
        if self.distribution.constraint is None:
            return self.distribution
        return replace(self.distribution, constraint=None)

    def noise(self, in_flight: int) -> Noise:
        """Return the noise of the next round, before which `in_flight` tokens are not committed
        yet."""
        return self.random.at(len(self.rounds) + in_flight, self.position + in_flight)

    def score(self, logits: mx.array, tokens: Sequence[int]) -> None:
        """Add the log-probabilities of prompt tokens. logits: (m, width); entry i predicts token
        i. Blocks."""
        top, vocabulary = self.request.top_logprobs or 0, self.distribution.vocabulary
        self.prompt_logprobs += token_logprobs(logits, tokens, top, vocabulary)

    def commit(self, tokens: Sequence[int], accepted: int) -> Step:
        """Commit tokens and return the step. The first `accepted` tokens are draft tokens. The last
        token is -1 if the target's logits are NaN or infinite."""
        # The group still runs passes over this row, and -1 is not a valid input token.
        self.committed += [max(0, token) for token in tokens]
        if self.ended:
            return Step(self.number, finish_reason=self._reason)
        count = len(tokens) - (tokens[-1] < 0)
        problem: FinishReason = "damaged"
        if (constraint := self.distribution.constraint) is not None:
            count = constraint.take(tokens[:count])
            # If the mask allows a token, only NaN or infinite logits can choose a forbidden one.
            problem = "eos" if constraint.complete else "stuck" if constraint.stuck else problem
        step = self._take(tokens[:count], min(accepted, count))
        # A token that was not accepted does not matter after the end of the row.
        if step.finish_reason is None and count < len(tokens):
            step = self._end(problem, step)
        return step

    def _take(self, tokens: Sequence[int], accepted: int) -> Step:
        """Emit tokens up to the first stop criterion. The first `accepted` ones are draft
        tokens."""
        taken = list(tokens[: self.left])
        end = next((at for at, token in enumerate(taken) if token in self.eos), None)
        reason: FinishReason | None = None
        if end is not None:
            taken, reason = taken[: end + 1], "eos"
        elif len(taken) == self.left:
            reason = "length"
        segments = [taken[:accepted], taken[accepted:]]
        if self.stops.strings:
            segments = [[token] for token in taken]
        emitted: list[int] = []
        text, chars = "", 0
        for ids in filter(None, segments):
            emitted += ids
            text += self._print([token for token in ids if token not in self.eos])
            if len(emitted) <= accepted:
                chars = len(text)
            if self.stops.met:
                reason = "stop"
                break
        self.left -= len(emitted)
        kept = min(accepted, len(emitted))
        step = Step(self.number, tuple(emitted), accepted=kept, text=text, accepted_chars=chars)
        if reason is None:
            return step
        step = self._end(reason, step)
        return replace(step, accepted_chars=len(step.text)) if len(emitted) <= accepted else step

    def finish(self, reason: FinishReason) -> Step:
        """End the row unless it has ended; emitted tokens remain valid."""
        if self.ended:
            return Step(self.number, finish_reason=self._reason)
        return self._end(reason, Step(self.number))

    def fail(self, problem: Exception | None = None) -> Step:
        """End the row and discard the text that was held back."""
        if problem is not None:
            log.error("a text has failed", exc_info=problem)
        if not self.ended:
            # Without the traceback, whose frames keep arrays alive.
            self.problem = None if problem is None else problem.with_traceback(None)
            self._reason, self.ended = "failed", True
        return Step(self.number, finish_reason=self._reason)

    def _end(self, reason: FinishReason, step: Step) -> Step:
        """End the row, and add the text that was held back to the last step."""
        text = step.text + self._rest()
        # The text that was held back may complete a stop string.
        self._reason, self.ended = "stop" if self.stops.met else reason, True
        return replace(step, text=text, finish_reason=self._reason, stop=self.stops.met)

    def _print(self, ids: Sequence[int]) -> str:
        text = self.stops.push(self.stream.push(ids)) if ids else ""
        if not self.stops.met and self.stops.would_stop(self.stream.pending()):
            text += self._rest()
        return text

    def _rest(self) -> str:
        if self.stops.met:
            return ""
        return self.stops.push(self.stream.finish()) + self.stops.finish()
