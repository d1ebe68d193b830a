"""Laws of the token and block rules, summed over all drafts in float64."""

import functools
import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_specdec.verification import rules

SYMBOLS = 3
Model = Callable[[tuple[int, ...]], np.ndarray]
Kept = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""A function of p (drafts, n + 1, symbols), q (drafts, n, symbols) and draft tokens (drafts, n). It
returns the probability of each number of accepted tokens, (drafts, n + 1), and the distribution of
the next token, shaped as p."""


def toy(seed: int, sharpness: float = 1.0) -> Model:
    """Conditionals that depend on everything before; some of them have zeros."""

    @functools.cache
    def conditional(prefix: tuple[int, ...]) -> np.ndarray:
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        weights = generator.gamma(sharpness, size=SYMBOLS)
        if generator.random() < 0.25:
            weights[generator.integers(SYMBOLS)] = 0.0
        return weights / weights.sum()

    return conditional


def in_float64(function, *arrays: np.ndarray) -> np.ndarray:
    with mx.stream(mx.cpu):
        converted = [
            mx.array(array, dtype=mx.int32 if array.dtype.kind == "i" else mx.float64)
            for array in arrays
        ]
        return np.array(function(*converted), dtype=np.float64)


def token_lengths(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lengths and laws of the token rule."""
    accept = in_float64(rules.accept_probabilities, p[:, :-1], q, x)
    one = np.ones((len(x), 1))
    going = np.hstack([one, np.cumprod(accept, axis=1)])
    after = in_float64(rules.correction, p[:, :-1], q)
    return going * np.hstack([1 - accept, one]), np.concatenate([after, p[:, -1:]], axis=1)


def block_lengths(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths and laws of the block rule, for which the longest success counts."""
    ratios = in_float64(rules.joint_ratios, p[:, :-1], q, x)
    accept = in_float64(rules.block_accept_probabilities, p[:, :-1], q, ratios)
    one = np.ones((len(x), 1))
    later_fail = np.hstack([np.cumprod((1 - accept)[:, ::-1], axis=1)[:, ::-1], one])
    after = in_float64(rules.correction, p[:, :-1], q, ratios[:, :-1])
    return np.hstack([one, accept]) * later_fail, np.concatenate([after, p[:, -1:]], axis=1)


def joint(target: Model, draft: Model, rule: Kept, n: int, tokens: int) -> tuple[dict, float]:
    """The joint law of the first `tokens` emitted symbols over as many rounds as that takes, and
    the mean number of accepted symbols of the first round."""
    result: dict[tuple[int, ...], float] = {}
    accepted = 0.0
    waiting = {(): 1.0}
    drafts = list(itertools.product(range(SYMBOLS), repeat=n))
    while waiting:
        prefix, chance = waiting.popitem()
        if len(prefix) >= tokens:
            result[prefix[:tokens]] = result.get(prefix[:tokens], 0.0) + chance
            continue
        q = np.array([[draft(prefix + x[:i]) for i in range(n)] for x in drafts])
        p = np.array([[target(prefix + x[:i]) for i in range(n + 1)] for x in drafts])
        drawn = np.take_along_axis(q, np.array(drafts)[..., None], axis=2).prod(axis=(1, 2))
        possible = np.flatnonzero(drawn)
        rules = rule(p[possible], q[possible], np.array(drafts)[possible])
        for number, lengths, after in zip(possible, *rules, strict=True):
            x, drafted = drafts[number], chance * drawn[number]
            accepted += drafted * (lengths @ np.arange(n + 1)) if not prefix else 0.0
            for length, symbol in itertools.product(range(n + 1), range(SYMBOLS)):
                more = drafted * lengths[length] * after[length, symbol]
                if more > 0:
                    key = (*prefix, *x[:length], symbol)
                    waiting[key] = waiting.get(key, 0.0) + more
    return result, accepted


def distance(target: Model, law: dict, tokens: int) -> float:
    """Total variation from the target's own joint law."""
    total = 0.0
    for text in itertools.product(range(SYMBOLS), repeat=tokens):
        exact = np.prod([target(text[:i])[text[i]] for i in range(tokens)])
        total += abs(exact - law.get(text, 0.0))
    return total / 2
