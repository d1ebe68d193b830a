"""Logits to log-probabilities: grammar mask, bias, penalties, temperature, top-k, top-p, min-p and
XTC, and the choice of a token. Arrays are (..., vocabulary); a removed token has the entry -inf."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..largest import largest
from .constraint import Constraint, ThoughtBudget
from .noise import digest_of, tossed
from .options import Options


def fit_vocabulary(logits: mx.array, vocabulary: int) -> mx.array:
    """Cut logits to `vocabulary` entries, or pad them with -inf, that is, with probability 0."""
    width = logits.shape[-1]
    if width >= vocabulary:
        return logits[..., :vocabulary]
    tail = mx.full((*logits.shape[:-1], vocabulary - width), -mx.inf, dtype=logits.dtype)
    return mx.concatenate([logits, tail], axis=-1)


def apply_penalties(
    logits: mx.array, counts: mx.array, settings: Options, in_prefix: mx.array
) -> mx.array:
    """Penalize tokens by their earlier occurrences.

    Args:
        counts: How often each token occurs in the completion, float32 that broadcasts to logits.
        in_prefix: Whether each token occurs before the completion, (vocabulary,) bool. Only the
            repetition penalty counts these tokens."""
    occurred = counts > 0
    if settings.repetition_penalty != 1:
        penalty = settings.repetition_penalty
        scaled = mx.where(logits > 0, logits / penalty, logits * penalty)
        logits = mx.where(occurred | in_prefix, scaled, logits)
    if settings.presence_penalty != 0:
        logits = logits - settings.presence_penalty * occurred.astype(logits.dtype)
    if settings.frequency_penalty != 0:
        logits = logits - settings.frequency_penalty * counts
    return logits


def keep_top_k(logits: mx.array, k: int) -> mx.array:
    """Keep the k largest entries of each row, and all entries equal to the k-th."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    least = mx.min(largest(logits, k), axis=-1, keepdims=True)
    return mx.where(logits < least, -mx.inf, logits)


def keep_top_p(logits: mx.array, p: float) -> mx.array:
    """Keep the smallest set of most likely tokens whose probability reaches p. Among equally likely
    tokens, lower ids come first (Holtzman et al., arXiv 1904.09751, section 3.1)."""
    if p >= 1:
        return logits
    # Tokens below `never` have at most (1 - p) / 2 of the probability, so they are not sorted.
    best = mx.max(logits, axis=-1, keepdims=True)
    total = mx.sum(mx.exp(logits - best), axis=-1, keepdims=True)
    never = best + mx.log(total * ((1 - p) / (2 * logits.shape[-1])))
    rising = mx.sort(mx.where(logits < never, -mx.inf, logits), axis=-1)
    least, count = _least(rising, mx.exp(rising - best), p * total)
    least = mx.maximum(least, never)
    above, equal = logits > least, logits == least
    ties = count - mx.sum(above, axis=-1, keepdims=True)
    dropped = (logits < least) | (equal & (mx.cumsum(equal, axis=-1) > ties))
    return mx.where(dropped, -mx.inf, logits)


def keep_top_k_and_p(logits: mx.array, k: int, p: float) -> mx.array:
    """Apply `keep_top_k`, then `keep_top_p`, and sort only k entries. All entries equal to the
    least remaining one stay."""
    if not (0 < k < logits.shape[-1] and p < 1):
        return keep_top_p(keep_top_k(logits, k), p)
    rising = mx.sort(largest(logits, k), axis=-1)
    least, _ = _least(rising, mx.softmax(rising, axis=-1), mx.array(p))
    return mx.where(logits < least, -mx.inf, logits)


def _least(rising: mx.array, shares: mx.array, enough: mx.array) -> tuple[mx.array, mx.array]:
    """Return the least log p that top-p keeps and how many tokens it keeps, (..., 1) each.

    Args:
        rising: (..., n) log p in ascending order, up to a constant.
        shares: (..., n) p in the same order, up to a factor.
        enough: The sum of shares to reach."""
    above = mx.cumsum(shares, axis=-1, reverse=True) - shares
    # Keep at least one token, also in rows of NaN, for which all comparisons are false.
    count = mx.maximum(mx.sum(above < enough, axis=-1, keepdims=True), 1)
    return mx.take_along_axis(rising, rising.shape[-1] - count, axis=-1), count


def keep_min_p(logits: mx.array, p: float) -> mx.array:
    """Keep tokens at least p times as likely as the best one (Nguyen et al., arXiv 2407.01082)."""
    if p <= 0:
        return logits
    best = mx.max(logits, axis=-1, keepdims=True)
    return mx.where(logits < best + math.log(p), -mx.inf, logits)


def exclude_top_choices(
    logits: mx.array, threshold: float, special: Sequence[int] = ()
) -> mx.array:
    """Apply XTC: remove all tokens above the threshold except the least likely of them and the
    `special` ids. mlx-lm and llama.cpp have the same filter."""
    probabilities = mx.softmax(logits, axis=-1)
    above = mx.where(probabilities > threshold, probabilities, mx.inf)
    excluded = probabilities > mx.min(above, axis=-1, keepdims=True)
    if special:
        excluded[..., mx.array(list(special))] = False
    return mx.where(excluded, -mx.inf, logits)


COLD = 1e-3
"""Temperature below which logits are shifted to a maximum of 0, lest the division overflow."""


@dataclass(eq=False)
class Distribution:
    """The sampling distributions of one sequence in the target or in a draft model.

    Attributes:
        vocabulary: The number of token ids.
        prompt: Determines, with the seed, at which positions XTC applies.
        constraint: The state of a grammar or of a thought's budget after the committed tokens; only
            a target has one.
        prefix_length: The number of committed tokens before the completion.
        kind: Distributions of equal kind compute the same function if no constraint is in force,
            so one call can serve a batch.
    """

    settings: Options
    vocabulary: int
    prompt: Sequence[int] = ()
    constraint: Constraint | ThoughtBudget | None = None
    prefix_length: int = 0

    def __post_init__(self) -> None:
        settings = self.settings
        self._counted = self.prefix_length
        self._in_prefix: mx.array | None = None
        self._counts: mx.array | None = None
        added = settings.presence_penalty != 0 or settings.frequency_penalty != 0
        if added or settings.repetition_penalty != 1:
            self._counts = mx.zeros((self.vocabulary,), dtype=mx.float32)
        self._bias: mx.array | None = None
        if bias := settings.logit_bias:
            self._bias = mx.zeros((self.vocabulary,))
            self._bias[mx.array(list(bias))] = mx.array(list(bias.values()))
        self._tosses = settings.temperature > 0 and settings.xtc_probability > 0
        self._digest = digest_of(self.prompt) if self._tosses else ""
        alone = self._counts is not None or self._tosses
        self.kind: object = self if alone else settings.kind
        self._special = [id for id in settings.xtc_special_tokens or () if id < self.vocabulary]

    def bound(self, count: int) -> bool:
        """Return whether a constraint may exclude one of the next `count` tokens."""
        return self.constraint is not None and not self.constraint.idle(count)

    def log_probabilities(
        self, logits: mx.array, committed: Sequence[int], drafted: mx.array
    ) -> mx.array:
        """Return log p, up to a constant, of the last m positions, (1, m, vocabulary).

        Greedy rows without bias or penalties keep the model's dtype. All other rows are float32.

        Args:
            logits: (1, m, width), m <= n + 1; the last row is for the token after `drafted`.
            committed: All committed tokens. They may only grow from call to call.
            drafted: (1, n) int32, tokens after the committed ones. Penalties count them."""
        settings = self.settings
        rows = fit_vocabulary(logits, self.vocabulary)
        if self.constraint is not None and self.bound(1 + drafted.shape[1]):
            # The device computes the logits while the host computes the masks.
            mx.async_eval(rows)
            tokens: Any = drafted.tolist()
            allowed = mx.array(self.constraint.masks(tokens[0])[-rows.shape[1] :])
            rows = mx.where(allowed, rows, -mx.inf)
        counts = None
        if self._counts is not None:
            counts = self._count(self._counts, committed, drafted, rows.shape[1])
        if settings.temperature == 0 and not settings.logit_bias and counts is None:
            return rows
        rows = rows.astype(mx.float32)
        if self._bias is not None:
            rows = rows + self._bias
        if counts is not None:
            assert self._in_prefix is not None, "_count has computed it"
            rows = apply_penalties(rows, counts, settings, self._in_prefix)
        if settings.temperature == 0:
            return rows
        if settings.temperature < COLD:
            rows = rows - mx.max(rows, axis=-1, keepdims=True)
        if settings.temperature != 1:
            rows = rows / settings.temperature
        if settings.filters:
            rows = keep_top_k_and_p(rows, settings.top_k, settings.top_p)
            rows = keep_min_p(rows, settings.min_p)
        if not self._tosses:
            return rows
        end = len(committed) + drafted.shape[1] + 1
        seed, chance = settings.seed, settings.xtc_probability
        places = range(end - rows.shape[1], end)
        applies = [tossed(seed, self._digest, place, chance) for place in places]
        if not any(applies):
            return rows
        excluded = exclude_top_choices(rows, settings.xtc_threshold, self._special)
        return mx.where(mx.array(applies)[:, None], excluded, rows)

    def _count(
        self, counts: mx.array, committed: Sequence[int], drafted: mx.array, rows: int
    ) -> mx.array:
        """Return how often each token occurs in the completion before each of the last `rows`
        positions, float32 that broadcasts to (1, rows, vocabulary)."""
        if self._in_prefix is None:
            self._in_prefix = self._added(counts, committed[: self.prefix_length]) > 0
        self._counts = counts = self._added(counts, committed[self._counted :])
        self._counted = len(committed)
        if drafted.shape[1] == 0:
            return counts
        hits = drafted[..., None] == mx.arange(self.vocabulary)
        hits = mx.pad(hits.astype(mx.float32), [(0, 0), (0, 1), (0, 0)])
        return counts + mx.cumsum(hits, axis=1, inclusive=False)[:, -rows:]

    def _added(self, counts: mx.array, tokens: Sequence[int]) -> mx.array:
        """Return `counts` plus the occurrences of each of these tokens."""
        ids = [token for token in tokens if token < self.vocabulary]
        return counts.at[mx.array(ids)].add(1.0) if ids else counts


def log_probabilities(
    distributions: Sequence[Distribution],
    logits: mx.array,
    committed: Sequence[Sequence[int]],
    drafted: mx.array,
) -> mx.array:
    """Return `Distribution.log_probabilities` of a batch, in one call if all kinds are equal and no
    constraint is in force.
    logits: (batch, m, width). drafted: (batch, n) int32."""
    first, count = distributions[0], 1 + drafted.shape[1]
    alike = all(row.kind == first.kind and not row.bound(count) for row in distributions)
    if alike or len(distributions) == 1:
        return first.log_probabilities(logits, committed[0], drafted)
    parts = [slice(row, row + 1) for row in range(len(distributions))]
    cut = zip(distributions, parts, committed, strict=True)
    rows = [one.log_probabilities(logits[n], ids, drafted[n]) for one, n, ids in cut]
    return mx.concatenate(rows)


def choose(log_p: mx.array, gumbel: mx.array | None) -> mx.array:
    """Return the Gumbel-max choice of each row, argmax(log p + g), (...) int32. log_p: (...,
    vocabulary), up to a constant per row. gumbel: Noise that broadcasts to log_p, or None."""
    scored = log_p if gumbel is None else log_p + gumbel
    return mx.argmax(scored, axis=-1).astype(mx.int32)
