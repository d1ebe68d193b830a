"""A sequence that is being decoded, its stop criteria, and the batch of sequences."""

from __future__ import annotations

import logging
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from ..interfaces import Noise, NoiseSource, Proposal, Verdict
from ..interfaces.records import FinishReason, Step, TokenLogprob
from ..interfaces.results import SequenceRound
from ..largest import indices_of_largest
from ..sampling.distribution import Distribution, log_probabilities
from ..sampling.noise import noise_of
from ..text.stream import StopStrings, TextStream

SCORED_ROWS = 32
"""Rows of logits whose log-probabilities are computed at once, which takes four times the memory of
these rows."""
NOTHING = Step()
log = logging.getLogger(__name__)


def token_logprobs(
    logits: mx.array, tokens: Seq[int], top: int, vocabulary: int
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of the tokens that one pass gave a sequence. Blocks.

    Args:
        logits: (m, width); row i predicts token i.
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
class StopCriteria:
    """The stop criteria of one sequence, which also convert its tokens to text.

    Attributes:
        eos: Ids of EOS tokens.
        remaining: How many tokens may still be emitted.
        stops: Finds stop strings in the text."""

    eos: Collection[int]
    remaining: int
    stream: TextStream
    stops: StopStrings

    def take(self, tokens: Seq[int], accepted: int) -> Step:
        """Take tokens up to the first stop criterion. The first `accepted` ones are draft
        tokens."""
        taken = list(tokens[: self.remaining])
        end = next((at for at, token in enumerate(taken) if token in self.eos), None)
        reason: FinishReason | None = None
        if end is not None:
            taken, reason = taken[: end + 1], "eos"
        elif len(taken) == self.remaining:
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
        self.remaining -= len(emitted)
        step = Step(
            tokens=tuple(emitted),
            accepted=min(accepted, len(emitted)),
            text=text,
            accepted_chars=chars,
        )
        if reason is None:
            return step
        step = self.finish(reason, step)
        return replace(step, accepted_chars=len(step.text)) if len(emitted) <= accepted else step

    def finish(self, reason: FinishReason, step: Step = NOTHING) -> Step:
        """End the sequence. Return the last step with the text that was held back."""
        text = step.text + self._rest()
        # The text that was held back may complete a stop string.
        reason = "stop" if self.stops.met else reason
        return replace(step, text=text, finish_reason=reason, stop=self.stops.met)

    def _print(self, ids: Seq[int]) -> str:
        text = self.stops.push(self.stream.push(ids)) if ids else ""
        stops = self.stops.strings and not self.stops.met
        if stops and self.stops.would_stop(self.stream.pending()):
            text += self._rest()
        return text

    def _rest(self) -> str:
        if self.stops.met:
            return ""
        return self.stops.push(self.stream.finish()) + self.stops.finish()


@dataclass(eq=False)
class Sequence:
    """One sequence that is being decoded.

    Attributes:
        prefix: `Model.prefix` of the prompt, committed from the beginning.
        distribution: The target's distribution.
        top_logprobs: How many of the most likely tokens to list per position; None returns no
            log-probabilities.
        prompt_logprobs: The log-probabilities of prompt tokens, which `score` adds.
        problem: The exception that ended this sequence alone, or None."""

    prefix: Seq[int]
    distribution: Distribution
    random: NoiseSource
    stop: StopCriteria
    top_logprobs: int | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list, init=False)
    problem: Exception | None = field(default=None, init=False)
    _rounds: int = field(default=0, init=False)
    _reason: FinishReason | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.committed = list(self.prefix)

    @property
    def position(self) -> int:
        """Output position of the next token: the number of generated tokens."""
        return len(self.committed) - len(self.prefix)

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted; 0 after the end."""
        return 0 if self.ended else self.stop.remaining

    def score(self, logits: mx.array, tokens: Seq[int]) -> None:
        """Add the log-probabilities of prompt tokens. logits: (rows, width); row i predicts token
        i. Blocks."""
        top, vocabulary = self.top_logprobs or 0, self.distribution.vocabulary
        for first in range(0, len(tokens), SCORED_ROWS):
            part = slice(first, first + SCORED_ROWS)
            self.prompt_logprobs += token_logprobs(logits[part], tokens[part], top, vocabulary)

    def noise(self, in_flight: int) -> Noise:
        """Return the noise of the next round, before which `in_flight` tokens are not committed
        yet. The loop calls this exactly once per round."""
        self._rounds += 1
        return self.random.at(self._rounds - 1, self.position + in_flight)

    @property
    def ended(self) -> bool:
        return self._reason is not None

    def commit(self, tokens: Seq[int], accepted: int) -> Step:
        """Commit tokens and return the step. The first `accepted` tokens are draft tokens. The last
        token is -1 if the target's row is NaN or infinite."""
        # The batch still runs passes over this row, and -1 is not a valid input token.
        self.committed += [max(0, token) for token in tokens]
        if self.ended:
            return Step(finish_reason=self._reason)
        count = len(tokens) - (tokens[-1] < 0)
        problem: FinishReason = "damaged"
        if (constraint := self.distribution.constraint) is not None:
            count = constraint.take(tokens[:count])
            # If the mask allows a token, only NaN or infinite logits can choose a forbidden one.
            problem = "eos" if constraint.complete else "stuck" if constraint.stuck else problem
        step = self.stop.take(tokens[:count], min(accepted, count))
        # A token that was not accepted does not matter after the end of the sequence.
        if step.finish_reason is None and count < len(tokens):
            step = self.stop.finish(problem, step)
        self._reason = step.finish_reason
        return step

    def finish(self, reason: FinishReason) -> Step:
        """End the sequence unless it has ended; emitted tokens remain valid."""
        if self.ended:
            return Step(finish_reason=self._reason)
        step = self.stop.finish(reason)
        self._reason = step.finish_reason
        return step

    def fail(self, problem: Exception | None = None) -> Step:
        """End the sequence and discard the text that was held back."""
        if problem is not None:
            log.error("a text has failed", exc_info=problem)
        if not self.ended:
            # Without the traceback, whose frames keep arrays alive.
            self.problem = None if problem is None else problem.with_traceback(None)
            self._reason = "failed"
        return Step(finish_reason=self._reason)


class Batch:
    """The sequences that share each target pass.

    Attributes:
        committed: All committed tokens, one list per sequence."""

    def __init__(self, sequences: Seq[Sequence]) -> None:
        self._set(sequences)

    def _set(self, sequences: Seq[Sequence]) -> None:
        self.sequences = tuple(sequences)
        self.committed = [sequence.committed for sequence in sequences]
        self._distributions = [sequence.distribution for sequence in sequences]
        self._logprobs = any(sequence.top_logprobs is not None for sequence in sequences)

    def join(self, other: Batch) -> None:
        self._set(self.sequences + other.sequences)

    def filter(self, keep: Seq[int]) -> None:
        self._set([self.sequences[row] for row in keep])

    @property
    def remaining(self) -> int:
        """The largest number of tokens that any sequence may still emit."""
        return max([sequence.remaining for sequence in self.sequences])

    @property
    def any_ended(self) -> bool:
        return any(sequence.ended for sequence in self.sequences)

    def bound(self, count: int) -> bool:
        """Return whether a constraint may exclude one of the next `count` tokens of a sequence."""
        return any(distribution.bound(count) for distribution in self._distributions)

    def cut(self, proposal: Proposal) -> Proposal:
        """Cut a proposal after the first token that a constraint forbids. If a constraint is in
        force, this waits for the draft tokens."""
        if proposal.size == 0 or not self.bound(proposal.size + 1):
            return proposal
        drafted: Any = proposal.tokens.tolist()
        counts = [proposal.count(row) for row in range(len(drafted))]
        for row, distribution in enumerate(self._distributions):
            if distribution.constraint is not None:
                counts[row] = distribution.constraint.verifiable(drafted[row][: counts[row]])
        made = proposal.cut(counts)
        # The masks read the tokens again. They would wait for the pass that is submitted now.
        mx.eval(made.tokens)
        return made

    def newest(self) -> mx.array:
        """Return (batch, 1) int32, the newest committed tokens, which the target has not seen."""
        return mx.array([tokens[-1:] for tokens in self.committed], dtype=mx.int32)

    def noise(self, in_flight: int = 0) -> Noise:
        """See Sequence.noise."""
        return noise_of([sequence.noise(in_flight) for sequence in self.sequences])

    def draw_ahead(self) -> None:
        """See NoiseSource."""
        for sequence in self.sequences:
            sequence.random.draw_ahead()

    def log_probabilities(self, logits: mx.array, following: mx.array) -> mx.array:
        """Return the log-probabilities of a pass, (batch, m, vocabulary); see Distribution.

        Args:
            logits: (batch, m, width); the last row predicts the token after `following`.
            following: (batch, n) int32, tokens after the newest committed ones."""
        return log_probabilities(self._distributions, logits, self.committed, following)

    def commit(
        self, proposal: Proposal, verdict: Verdict
    ) -> tuple[tuple[Step, ...], tuple[SequenceRound, ...]]:
        """Wait for the verdict, then commit the accepted tokens and the next token. A sequence ends
        with "damaged" if its logits are NaN or infinite, with "failed" after an exception."""
        following: Any = verdict.next.tolist()
        size = proposal.size
        accepted_rows: Any = verdict.accepted.tolist() if size else None
        drafted: Any = proposal.tokens.tolist() if size else None
        steps, rounds = [], []
        for row, sequence in enumerate(self.sequences):
            accepted, tokens = 0, [following[row]]
            if size:
                accepted = sum(accepted_rows[row])
                tokens = [*drafted[row][:accepted], following[row]]
            position, before = sequence.position, len(sequence.committed)
            try:
                step = sequence.commit(tokens, accepted)
            except Exception as problem:
                step = self._end(sequence, problem)
                # The batch still runs passes over the row of this sequence.
                sequence.committed[before:] = [max(0, token) for token in tokens]
            count, source = proposal.count(row) if size else 0, proposal.source_of(row)
            ended = step.finish_reason is not None
            rounds.append(
                SequenceRound(
                    drafted=count,
                    accepted=accepted,
                    emitted=len(step.tokens),
                    position=position,
                    committed=sequence.committed,
                    ended=ended,
                    left=sequence.remaining,
                    source=source,
                )
            )
            if count:
                count = min(count, len(step.tokens)) if ended else count
                step = replace(step, drafted=count, proposer=source)
            steps.append(step)
        return tuple(steps), tuple(rounds)

    def _end(self, sequence: Sequence, problem: Exception) -> Step:
        """End one sequence of several; raise the problem if there is only one sequence."""
        if len(self.sequences) == 1:
            raise problem
        return sequence.fail(problem)

    def with_logprobs(self, steps: tuple[Step, ...], logits: mx.array) -> tuple[Step, ...]:
        """Add log-probabilities to the steps of sequences that request them. logits: (batch, m,
        width) of the target."""
        if not self._logprobs:
            return steps
        results = list(steps)
        for row, (sequence, step) in enumerate(zip(self.sequences, steps, strict=True)):
            if sequence.top_logprobs is None or not step.tokens:
                continue
            vocabulary = sequence.distribution.vocabulary
            try:
                settings = step.tokens, sequence.top_logprobs, vocabulary
                results[row] = replace(step, logprobs=token_logprobs(logits[row], *settings))
            except Exception as problem:
                results[row] = self._end(sequence, problem)
        return tuple(results)
