"""A sequence that is being decoded, where its text ends, and several sequences as a batch."""

from __future__ import annotations

import logging
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx

from ..interfaces import Noise, NoiseSource, Proposal, Verdict, rectangle
from ..interfaces.results import SequenceRound
from ..largest import indices_of_largest
from ..sampling.distribution import Distribution, log_probabilities
from ..sampling.noise import noise_of
from ..text.stream import StopStrings, TextStream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token in the target, before temperature, penalties and filters.

    Attributes:
        token: The id of the emitted token.
        logprob: Its natural log-probability.
        top: The most likely tokens of the position as (id, log-probability), the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: mx.array, tokens: Seq[int], top: int, vocabulary: int
) -> tuple[TokenLogprob, ...]:
    """Return the logprobs of the tokens that a sequence got in one pass; waits for them. logits:
    (m, width), row i about token i. top: how many of the likeliest to list. vocabulary: columns
    beyond it are padding."""
    rows = logits[: len(tokens), :vocabulary].astype(mx.float32)
    rows = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(rows, mx.array(list(tokens), dtype=mx.int32)[:, None], axis=-1)
    top = min(top, vocabulary)
    best = indices_of_largest(rows, max(1, top))[:, :top]
    values = mx.take_along_axis(rows, best, axis=-1)
    mx.eval(chosen, best, values)
    ids: Any = best.tolist()
    logprobs: Any = chosen.tolist()
    theirs: Any = values.tolist()
    return tuple(
        TokenLogprob(
            token,
            logprobs[at][0],
            tuple(sorted(zip(ids[at], theirs[at], strict=True), key=lambda each: -each[1])),
        )
        for at, token in enumerate(tokens)
    )


FinishReason = Literal["eos", "length", "stop", "interrupted", "damaged", "stuck", "failed"]


@dataclass(frozen=True)
class Piece:
    """A piece of the text that became printable.

    Attributes:
        text: The text, never empty.
        drafted: Whether accepted draft tokens completed it.
    """

    text: str
    drafted: bool


@dataclass(frozen=True)
class Emission:
    """The output of one step for one sequence. The emission of a step of the prompt is empty.

    Attributes:
        tokens: The ids of the new tokens, an EOS token included.
        pieces: The text that became printable, without EOS token and stop strings.
        finish_reason: Why the sequence has ended, or None; see `Result`.
        logprobs: The log-probabilities of the tokens, if the request asks for them.
        drafted: How many of the tokens, counted from the first, were draft tokens.
        stop: The stop string that ended the text, or "".
    """

    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: int = 0
    stop: str = ""

    @property
    def text(self) -> str:
        """All pieces joined."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(eq=False, kw_only=True)
class StopCriteria:
    """Takes committed tokens in order and says where to stop. eos: ids that end the text.
    remaining: how many tokens may still be emitted."""

    eos: Collection[int]
    remaining: int
    stream: TextStream
    stops: StopStrings | None
    _stopped: bool = field(default=False, init=False)

    def take(self, tokens: Seq[int], drafted: int) -> Emission:
        """Emit tokens up to the first reason to end, the first `drafted` of which were drafted."""
        taken = list(tokens[: self.remaining])
        end = next((at for at, token in enumerate(taken) if token in self.eos), None)
        reason: FinishReason | None = None
        if end is not None:
            taken, reason = taken[: end + 1], "eos"
        elif len(taken) == self.remaining:
            reason = "length"
        stretches = [(taken[:drafted], True), (taken[drafted:], False)]
        if self.stops is not None:
            stretches = [([token], index < drafted) for index, token in enumerate(taken)]
        emitted: list[int] = []
        pieces: list[Piece] = []
        for ids, is_draft in stretches:
            if not ids:
                continue
            emitted += ids
            if text := self._print([token for token in ids if token not in self.eos]):
                pieces.append(Piece(text, is_draft))
            if self._stopped:
                reason = "stop"
                break
        self.remaining -= len(emitted)
        count = min(drafted, len(emitted))
        if reason is None:
            return Emission(tuple(emitted), tuple(pieces), drafted=count)
        last = self.finish(reason, is_draft=len(emitted) <= drafted)
        pieces += last.pieces
        return replace(last, tokens=tuple(emitted), pieces=tuple(pieces), drafted=count)

    def finish(self, reason: FinishReason, *, is_draft: bool = False) -> Emission:
        """End here, with nothing more to emit than text held back so far."""
        rest = self._rest()
        # What was held back may complete a stop string only now.
        return Emission(
            (),
            (Piece(rest, is_draft),) if rest else (),
            "stop" if self._stopped else reason,
            stop="" if self.stops is None else self.stops.met,
        )

    def _print(self, ids: Seq[int]) -> str:
        text = self.stream.push(ids) if ids else ""
        if self.stops is None:
            return text
        safe, self._stopped = self.stops.push(text)
        if not self._stopped and self.stops.would_stop(self.stream.pending()):
            safe += self._rest()
        return safe

    def _rest(self) -> str:
        if self._stopped:
            return ""
        text = self.stream.finish()
        if self.stops is None:
            return text
        safe, self._stopped = self.stops.push(text)
        return safe if self._stopped else safe + self.stops.finish()


@dataclass(eq=False)
class Sequence:
    """One sequence that is being decoded. prefix: `Model.prefix` of the prompt, committed from the
    beginning. distribution: of the target. top_logprobs: how many of the likeliest tokens to list
    for each position; None lists nothing. problem: the exception that ended this sequence while the
    others of its batch went on."""

    prefix: Seq[int]
    distribution: Distribution
    random: NoiseSource
    stop: StopCriteria
    top_logprobs: int | None = None
    problem: Exception | None = field(default=None, init=False)
    _rounds: int = field(default=0, init=False)
    _reason: FinishReason | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.committed = list(self.prefix)

    @property
    def position(self) -> int:
        """How many tokens were generated, and so the position of the next one."""
        return len(self.committed) - len(self.prefix)

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted; 0 after the end."""
        return 0 if self._reason is not None else self.stop.remaining

    def noise(self, in_flight: int) -> Noise:
        """Return the noise of the next round, which `in_flight` tokens precede that are not
        committed yet. To be called once a round."""
        self._rounds += 1
        return self.random.at(self._rounds - 1, self.position + in_flight)

    @property
    def ended(self) -> bool:
        return self._reason is not None

    def commit(self, tokens: Seq[int], drafted: int) -> Emission:
        """Commit tokens, the first `drafted` of which were drafted, and return what is emitted,
        which is nothing after the end. The last token is -1 where the target's row is damaged."""
        # Passes of the others in the batch need some token in the place of -1.
        self.committed += [max(0, token) for token in tokens]
        if self._reason is not None:
            return Emission((), (), self._reason)
        count = len(tokens) - (tokens[-1] < 0)
        problem: FinishReason = "damaged"
        if (constraint := self.distribution.constraint) is not None:
            count = constraint.take(tokens[:count])
            # Where something can come, only numbers that are none choose something else.
            problem = "eos" if constraint.complete else "stuck" if constraint.stuck else problem
        emission = self.stop.take(tokens[:count], min(drafted, count))
        # A bad token behind the end of the text does not matter.
        if emission.finish_reason is None and count < len(tokens):
            end = self.stop.finish(problem)
            pieces, reason = emission.pieces + end.pieces, end.finish_reason
            emission = replace(emission, pieces=pieces, finish_reason=reason, stop=end.stop)
        self._reason = emission.finish_reason
        return emission

    def finish(self, reason: FinishReason) -> Emission:
        """End here, if it has not ended; what was emitted stays."""
        if self._reason is not None:
            return Emission((), (), self._reason)
        emission = self.stop.finish(reason)
        self._reason = emission.finish_reason
        return emission

    def fail(self, problem: Exception | None = None) -> Emission:
        """End here without the text that was held back."""
        if problem is not None:
            log.error("a text has failed", exc_info=problem)
        if self._reason is None:
            # The frames of its traceback hold arrays.
            self.problem = None if problem is None else problem.with_traceback(None)
            self._reason = "failed"
        return Emission((), (), self._reason)


class Batch:
    """Sequences that go through passes together. committed: all committed tokens, one list per
    sequence. constrained: whether one has a grammar, which must know all tokens before a mask."""

    def __init__(self, sequences: Seq[Sequence]) -> None:
        self._set(sequences)

    def _set(self, sequences: Seq[Sequence]) -> None:
        self.sequences = tuple(sequences)
        self.committed = [each.committed for each in sequences]
        self._distributions = [each.distribution for each in sequences]
        self.constrained = any(each.constraint is not None for each in self._distributions)
        self._logprobs = any(each.top_logprobs is not None for each in sequences)

    def join(self, other: Batch) -> None:
        self._set(self.sequences + other.sequences)

    def filter(self, keep: Seq[int]) -> None:
        self._set([self.sequences[row] for row in keep])

    @property
    def remaining(self) -> int:
        """The most tokens that a sequence may still emit."""
        return max([each.remaining for each in self.sequences])

    @property
    def any_ended(self) -> bool:
        return any(each.ended for each in self.sequences)

    def cut(self, proposal: Proposal) -> Proposal:
        """Cut a proposal before the first token that a grammar forbids; where there is a grammar,
        this waits for the draft."""
        if not self.constrained or proposal.size == 0:
            return proposal
        drafted: Any = proposal.tokens.tolist()
        counts = []
        for row, each in enumerate(self._distributions):
            count = proposal.count(row)
            if each.constraint is not None:
                count = each.constraint.verifiable(drafted[row][:count])
            counts.append(count)
        size = max(counts)
        return replace(
            proposal,
            # Made of numbers that are known here, so that reading them again waits for nothing.
            tokens=rectangle([tokens[:size] for tokens in drafted]),
            rows=None if proposal.rows is None else proposal.rows[:, :size],
            counts=tuple(counts),
        )

    def newest(self) -> mx.array:
        """Return (batch, 1) int32, the newest committed tokens, which the target has not seen."""
        return mx.array([tokens[-1:] for tokens in self.committed], dtype=mx.int32)

    def noise(self, in_flight: int = 0) -> Noise:
        """See Sequence.noise."""
        return noise_of([each.noise(in_flight) for each in self.sequences])

    def draw_ahead(self) -> None:
        """See NoiseSource."""
        for each in self.sequences:
            each.random.draw_ahead()

    def log_probabilities(self, logits: mx.array, following: mx.array) -> mx.array:
        """Return the log-probabilities of a pass, (batch, m, vocabulary); see Distribution. logits:
        (batch, m, width), whose rows follow the newest committed token and then `following`,
        (batch, n) int32."""
        return log_probabilities(self._distributions, logits, self.committed, following)

    def commit(
        self, proposal: Proposal, verdict: Verdict
    ) -> tuple[tuple[Emission, ...], tuple[SequenceRound, ...]]:
        """Wait for the verdict and commit the accepted tokens, and the token after them. A sequence
        whose row is damaged ends with the reason "damaged", one that fails here with "failed"."""
        following: Any = verdict.next.tolist()
        size = proposal.size
        accepted_rows: Any = verdict.accepted.tolist() if size else None
        drafted: Any = proposal.tokens.tolist() if size else None
        emissions, rounds = [], []
        for row, each in enumerate(self.sequences):
            accepted, tokens = 0, [following[row]]
            if size:
                accepted = sum(accepted_rows[row])
                tokens = [*drafted[row][:accepted], following[row]]
            position, before = each.position, len(each.committed)
            try:
                emission = each.commit(tokens, accepted)
            except Exception as problem:
                emission = self._end(each, problem)
                # Passes of the others go on over its row.
                each.committed[before:] = [max(0, token) for token in tokens]
            emissions.append(emission)
            rounds.append(
                SequenceRound(
                    drafted=proposal.count(row) if size else 0,
                    accepted=accepted,
                    emitted=len(emission.tokens),
                    position=position,
                    committed=each.committed,
                    ended=emission.finish_reason is not None,
                    left=each.remaining,
                    source=proposal.source_of(row),
                )
            )
        return tuple(emissions), tuple(rounds)

    def _end(self, each: Sequence, problem: Exception) -> Emission:
        """End one sequence; raises the problem where there is no other one."""
        if len(self.sequences) == 1:
            raise problem
        return each.fail(problem)

    def with_logprobs(
        self, emissions: tuple[Emission, ...], logits: mx.array
    ) -> tuple[Emission, ...]:
        """Return the emissions of a pass, with logprobs for sequences that want them. logits: of
        the target, (batch, m, width)."""
        if not self._logprobs:
            return emissions
        with_them = list(emissions)
        for row, (each, emission) in enumerate(zip(self.sequences, emissions, strict=True)):
            if each.top_logprobs is None or not emission.tokens:
                continue
            vocabulary = each.distribution.vocabulary
            try:
                given = emission.tokens, each.top_logprobs, vocabulary
                with_them[row] = replace(emission, logprobs=token_logprobs(logits[row], *given))
            except Exception as problem:
                with_them[row] = self._end(each, problem)
        return tuple(with_them)
