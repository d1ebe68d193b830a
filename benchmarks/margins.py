"""Explain how close the choices of an output were, by scoring the output again:

    python benchmarks/margins.py PROMPT --model MODEL [--draft-model DRAFT] [--num-draft N] ...

Prints JSON for plain decoding and for decoding with drafts: the smallest margin of each, the number
of ties, and where the two outputs part, if they do.

A choice depends on rounding in two ways: which of the tokens that passed the filters is best
(`lead`), and which tokens passed (`cut_distance`). The unit of both is the change of one
log-probability relative to another. Top-p compares masses, by their log-odds, which no change of a
log-probability moves by more."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec import generate, load, system

if __name__ == "__main__":
    system.load_blas()

import mlx.core as mx

from mlx_specdec.core.distribution import Distribution
from mlx_specdec.core.loop import PREFILL_CHUNK
from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Prompt
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import beginning, encode, for_model, make_noise
from mlx_specdec.largest import largest
from mlx_specdec.models.exact import exactly
from mlx_specdec.types import Context, feed

ROWS = 16
"""Number of output tokens that one pass scores. 16 rows of 256,000 float32 logits take 16 MB."""

NOISE_ROWS = 128
"""Number of random tokens by which the noise of a model is measured."""


@dataclass(frozen=True)
class SmallestMargin:
    """The smallest margin of an output, and the position of its token, counted from 0."""

    value: float
    position: int


@dataclass(frozen=True)
class Margins:
    """How close the choice of each token of an output was.

    Attributes:
        values: The lead of the best token over the second one, in log-probabilities with noise. If
            the distance to a cut of top-k, top-p or min-p is smaller, that distance.
        ties: Whether the margin is at most the noise of the target's passes; see `noise_of`. At a
            tie, a pass over another number of rows may choose the other token."""

    values: tuple[float, ...]
    ties: tuple[bool, ...]

    @property
    def smallest(self) -> SmallestMargin | None:
        """The first of the smallest margins; None if no token had a rival."""
        value = min(self.values, default=math.inf)
        return SmallestMargin(value, self.values.index(value)) if math.isfinite(value) else None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of --json."""
        smallest = self.smallest
        return {
            "smallest_margin": None if smallest is None else asdict(smallest),
            "tied_positions": sum(self.ties),
        }


@dataclass(frozen=True)
class Parting:
    """The first position at which two outputs differ, with its margin and tie (see `Margins`).
    These are None if the outputs were not scored. The margin is None if the token had no rival."""

    position: int
    margin: float | None = None
    tie: bool | None = None


def find_parting(prompt: Sequence[int], first: Sequence[int], second: Sequence[int]) -> Parting:
    """Return where two outputs differ first, without scoring them."""
    shorter = min(len(first), len(second))
    return Parting(next((at for at in range(shorter) if first[at] != second[at]), shorter))


def compare(
    pair: Pair, options: Options, prompt: Prompt, first: Sequence[int], second: Sequence[int]
) -> Parting:
    """Return where two outputs of a prompt differ first, and how close the choice was there."""
    position = find_parting((), first, second).position
    longer = max(first, second, key=len)
    if (found := score(pair, options, prompt, longer[: position + 1])) is None:
        return Parting(position)
    margin = found.values[-1]
    return Parting(position, margin if math.isfinite(margin) else None, found.ties[-1])


def score(pair: Pair, options: Options, prompt: Prompt, tokens: Sequence[int]) -> Margins | None:
    """Score the tokens that the pair has generated for a prompt, with the noise that they were
    drawn with. Return None if they are not the largest entries of log p + noise. This is so
    for the rules token and block above temperature 0, and for the rule typical."""
    name = options.rule_name
    if name == "typical" or (options.temperature > 0 and name != "coupled"):
        return None
    bound, options = for_model(pair, options)
    ids = encode(bound, prompt, options)
    committed = beginning(bound, ids, options)
    constraint = bound.constraint(options)
    without = replace(options, top_k=0, top_p=1.0, min_p=0.0, xtc_probability=0.0)
    shared = bound.vocabulary, ids, constraint, len(committed)
    filtered, unfiltered = Distribution(options, *shared), Distribution(without, *shared)
    noise = make_noise(bound, ids, options)
    context: Context = pair.target.open_batch([ids])
    rows = ROWS if pair.target.rows_agree else 1
    if options.exact:
        passes = pair.target.exact
        context, rows = exactly(context, passes.least), passes.most
    context.evaluate()
    for start in range(0, len(committed) - 1, PREFILL_CHUNK):
        feed(context, [committed[:-1][start : start + PREFILL_CHUNK]])
        context.evaluate()
    noise_limit = noise_of(pair, exact=options.exact)
    values: list[float] = []
    ties: list[bool] = []
    for start in range(0, len(tokens), rows):
        new = list(tokens[start : start + rows])
        logits = context.advance(mx.array([[committed[-1], *new[:-1]]])).logits
        following = mx.array([new[:-1]], dtype=mx.int32)
        scored = filtered.log_probabilities(logits, committed, following)
        gumbel = noise.at(0, start).target(len(new))
        scored = scored if gumbel is None else scored + gumbel
        margins = lead(scored)
        tied = margins <= noise_limit
        if options.filters and gumbel is not None:
            before = unfiltered.log_probabilities(logits, committed, following)
            distances = cut_distance(scored, before, gumbel, options)
            margins = mx.where(distances < margins, distances, margins)
        values += cast(list[float], margins[0].tolist())
        ties += cast(list[bool], tied[0].tolist())
        if constraint is not None:
            constraint.take(new)
        committed += new
    return Margins(tuple(values), tuple(ties))


def noise_of(pair: Pair, *, exact: bool = False) -> float:
    """Return the largest change, on this device, of the lead of the best token if a pass has one
    row instead of ROWS. It is 0 for exact passes."""
    if exact:
        return 0.0
    tokens = mx.random.randint(0, pair.vocabulary, (1, NOISE_ROWS), mx.int32, key=mx.random.key(0))
    leads = []
    for rows in (1, ROWS):
        context = pair.target.open_batch([tokens[0, :8].tolist()])  # type: ignore[arg-type]
        parts = [tokens[:, start : start + rows] for start in range(0, NOISE_ROWS, rows)]
        logits = mx.concatenate([context.advance(part).logits for part in parts], axis=1)
        leads.append(lead(logits[..., : pair.vocabulary]))
    largest_change: Any = mx.max(mx.abs(leads[0] - leads[1])).item()
    return float(largest_change)


def lead(scored: mx.array) -> mx.array:
    """Return how far the best entry of each row is above the second best, (...) float32. The lead
    is infinite if there is no second one. scored: (..., vocabulary >= 2)."""
    two = largest(scored, 2)
    return (mx.max(two, axis=-1) - mx.min(two, axis=-1)).astype(mx.float32)


def cut_distance(
    scored: mx.array, before: mx.array, gumbel: mx.array, settings: Options
) -> mx.array:
    """Return the least change of each row that excludes the chosen token, or lets another token be
    chosen, (...) float32. It is a lower bound, which is exact unless several tokens near the cut
    would have to change places.

    Args:
        scored: (..., vocabulary), log p + gumbel, -inf if a filter dropped the token.
        before: (..., vocabulary), log p up to a constant, before the filters were applied.
        gumbel: The noise that was added to the tokens that passed.
    """
    passed = scored > -mx.inf
    dropped = mx.where(passed, -mx.inf, before)
    least = mx.min(mx.where(passed, before, mx.inf), axis=-1, keepdims=True)
    chosen = mx.argmax(scored, axis=-1, keepdims=True)
    chosen_log_p = mx.take_along_axis(before, chosen, axis=-1)
    stays, enters = mx.array(mx.inf), mx.array(-mx.inf)
    top = before
    if 0 < settings.top_k < before.shape[-1]:
        smallest = least
        if settings.top_p < 1 or settings.min_p > 0:
            top = largest(before, settings.top_k)
            smallest = mx.min(top, axis=-1, keepdims=True)
        stays = chosen_log_p - mx.max(dropped, axis=-1, keepdims=True)
        enters = smallest - dropped
    if settings.top_p < 1:
        falls_out, next_in = _top_p(top, least, chosen_log_p, settings.top_p)
        stays = mx.minimum(chosen_log_p - mx.max(dropped, axis=-1, keepdims=True), falls_out)
        enters = mx.maximum(enters, mx.minimum(least - dropped, next_in))
    if settings.min_p > 0:
        slack = math.log(settings.min_p)
        without = mx.put_along_axis(before, chosen, mx.array(-mx.inf, dtype=before.dtype), axis=-1)
        rival = mx.max(without, axis=-1, keepdims=True)
        stays = mx.minimum(stays, chosen_log_p - (rival + slack))
        enters = mx.maximum(enters, mx.max(before, axis=-1, keepdims=True) + slack - dropped)
    behind = mx.max(scored, axis=-1, keepdims=True) - (dropped + gumbel)
    rivals = mx.min(mx.maximum(enters, behind), axis=-1, keepdims=True)
    return mx.maximum(mx.minimum(stays, rivals), 0.0)[..., 0]


def _top_p(
    top: mx.array, least: mx.array, chosen_log_p: mx.array, p: float
) -> tuple[mx.array, mx.array]:
    """Return two changes, (..., 1): the first excludes the chosen token, and the second includes
    the best token that top-p dropped. `top`, (..., n), is the input of top-p, and `least` the
    smallest log p that passed."""
    best = mx.max(top, axis=-1, keepdims=True)
    mass = mx.exp(top - best)
    inside = mx.sum(mass * (top >= least), axis=-1, keepdims=True)
    outside = mx.sum(mass * (top < least), axis=-1, keepdims=True)
    above = mx.sum(mass * (top > chosen_log_p), axis=-1, keepdims=True)
    odds = math.log(p) - math.log1p(-p)
    next_in = mx.log(inside) - mx.log(outside) - odds

    def missing(part: mx.array) -> mx.array:
        return odds - mx.log(part) + mx.log(inside + outside - part)

    # The chosen token drops out if the mass above it reaches p, or if tokens below overtake it.
    lower = mx.where((top >= least) & (top < chosen_log_p), top, -mx.inf)
    below = chosen_log_p - mx.max(lower, axis=-1, keepdims=True)
    overtaken = mx.maximum(below, missing(mx.maximum(inside - mx.exp(chosen_log_p - best), 0.0)))
    return mx.minimum(missing(above), overtaken), next_in


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-draft", type=int, default=3)
    parser.add_argument("--max-tokens", "-m", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true")
    given = vars(parser.parse_args())
    prompt, names = given.pop("prompt"), [given.pop(name) for name in ("model", "draft_model")]
    pair = load(*names, dtype=given.pop("dtype"))
    options = Options(**given, cost_cache=False)
    outputs = {}
    for name in ("plain", "drafts"):
        how = replace(options, regular=name == "plain")
        outputs[name] = tokens = generate(pair, prompt, how).tokens
        found = score(pair, how, prompt, tokens)
        print(
            json.dumps(
                {"output": name, "tokens": len(tokens), **(found.as_dict() if found else {})}
            )
        )
    if outputs["plain"] != outputs["drafts"]:
        parting = compare(pair, options, prompt, outputs["plain"], outputs["drafts"])
        print(json.dumps({"output": "both", **asdict(parting)}))


if __name__ == "__main__":
    main()
