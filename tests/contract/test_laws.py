"""What many completions look like together: each rule samples from the distribution it promises.

The models have eight tokens, and the next token depends on the newest one alone. So all tokens that
follow the same one are draws from one distribution, which `top_logprobs` lists."""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec import Options, Request, load, stream_many

from ..support import tiny
from ..support.speculators import MAKERS
from .outcomes import together
from .pairs import letters, width_of

SIZE, END, LENGTH, REQUESTS = 8, 1, 40, 120
TEMPERATURE = 0.8
SIGMAS = 4
"""Seeds are fixed, so that a right program passes always. A wrong one is off by far more."""
Law = np.ndarray[Any, Any]
"""Row i is the distribution of the token after token i."""


def write(directory: Path, seed: int, near: Path | None = None) -> Path:
    """Write a model without attention. near: A model whose head is similar."""
    tiny.write("llama", directory, seed, vocab_size=SIZE, num_hidden_layers=1)
    file = str(directory / "model.safetensors")
    weights: Any = mx.load(file)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] = mx.zeros_like(weights[name])
    if near is not None:
        weights |= mx.load(str(near / "model.safetensors"))
        noise = mx.random.normal(weights["lm_head.weight"].shape, key=mx.random.key(seed))
        weights["lm_head.weight"] += 0.12 * noise
    else:
        weights["lm_head.weight"] *= 0.5
    mx.save_safetensors(file, weights, {"format": "mlx"})
    return letters(directory, "abcde", ())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("laws")
    write(home / "draft", 5, near=write(home / "target", 3))
    return home


@pytest.fixture(scope="module")
def pair(home: Path) -> Any:
    return load(home / "target", home / "draft")


def law_of(pair: Any) -> Law:
    options, rows = Options(max_tokens=1, regular=True), []
    requests = [Request([token], options, top_logprobs=SIZE) for token in range(SIZE)]
    for outcome in together(pair, requests, batch_size=SIZE):
        weights = np.exp([outcome.logprobs[0][token] / TEMPERATURE for token in range(SIZE)])
        rows.append(weights / weights.sum())
    return np.array(rows)


@pytest.fixture(scope="module")
def law(pair: Any) -> Law:
    return law_of(pair)


Sample = Callable[..., list[list[Any]]]


@pytest.fixture(scope="module")
def sampled(home: Path, pair: Any) -> Sample:
    @functools.cache
    def sample(rule: str, proposer: str, **changes: Any) -> list[list[Any]]:
        """Return the steps of completions that differ in their seeds. Each step is a pair of the
        newest token before it and of the step."""
        settings: dict[str, Any] = {
            "max_tokens": LENGTH,
            "temperature": TEMPERATURE,
            "rule": rule,
            "num_draft": 3,
            "ngram_min": 1,
            "proposer": proposer,
            "cost_cache": False,
        }
        drafting = pair
        if proposer in MAKERS:
            sizes = {"width": width_of(home / "target"), "vocabulary": SIZE, "hidden_count": 1}
            half = {"drafted": SIZE // 2} if proposer == "eagle3" else {}
            drafter = MAKERS[proposer](home / rule / proposer, **sizes, **half)
            drafting = load(home / "target", drafter)
        newest = [3 + seed % 5 for seed in range(REQUESTS)]
        requests = [
            Request([token], Options(**{**settings, "seed": seed, **changes}))
            for seed, token in enumerate(newest)
        ]
        steps: list[list[Any]] = [[] for _ in requests]
        for step in stream_many(drafting, requests, requests[0].options, batch_size=REQUESTS):
            assert step.error is None
            if step.tokens:
                steps[step.number].append((newest[step.number], step))
                newest[step.number] = step.tokens[-1]
        return steps

    return sample


def chains(completions: list[list[Any]]) -> Iterator[list[int]]:
    """Yield the last token of each prompt and the completion."""
    for steps in completions:
        yield [steps[0][0], *(token for _, step in steps for token in step.tokens)]


def counts_of(completions: list[list[Any]], apart: int = 1) -> Law:
    """Return how often each token follows each other one, at a distance."""
    counts = np.zeros((SIZE, SIZE))
    for chain in chains(completions):
        for before, token in zip(chain, chain[apart:], strict=False):
            counts[before, token] += 1
    return counts


def assert_fits(counts: Law, law: Law) -> None:
    """Compare counts with a distribution by a chi-square. Rare outcomes count together."""
    statistic = freedom = 0.0
    for row, chances in zip(counts, law, strict=True):
        expected = chances * row.sum()
        often = expected >= 5
        if often.any():
            cells = [*zip(row[often], expected[often], strict=True)]
            rest = expected[~often].sum()
            if rest >= 1:
                cells.append((row[~often].sum(), rest))
            statistic += sum((found - wanted) ** 2 / wanted for found, wanted in cells)
            freedom += len(cells) - 1
    assert freedom > SIZE
    assert statistic < freedom + SIGMAS * math.sqrt(2 * freedom), (statistic, freedom)


EXACT = [(rule, name) for rule in ("coupled", "token", "block") for name in ("draft", "ngram")]


EXACT += [("token", "dspark"), ("block", "eagle3")]


@pytest.mark.parametrize(("rule", "proposer"), [*EXACT, ("coupled", "none"), ("token", "none")])
def test_exact_rules_sample_from_the_targets_distribution(
    sampled: Sample, law: Law, rule: str, proposer: str
) -> None:
    completions = sampled(rule, proposer)
    assert_fits(counts_of(completions), law)
    # Neighbors are independent, given the token before them: no random number is used twice.
    two = np.delete(law, END, axis=1) @ np.delete(law, END, axis=0)
    assert_fits(counts_of(completions, apart=2), two / two.sum(axis=1, keepdims=True))
    steps = [step for steps in completions for _, step in steps]
    drafted, accepted = sum(step.drafted for step in steps), sum(step.accepted for step in steps)
    assert 0.1 * drafted < accepted < 0.9 * drafted or proposer == "none"


def first_drafts(completions: list[list[Any]]) -> list[tuple[int, int]]:
    """Return the token before each draft, and whether its first token was accepted."""
    steps = (step for steps in completions for step in steps)
    return [(before, min(step.accepted, 1)) for before, step in steps if step.drafted]


def test_drafts_are_accepted_as_often_as_each_rule_promises(
    home: Path, sampled: Sample, law: Law
) -> None:
    """By the total variation tv of both models, the token rule accepts with probability 1 - tv, and
    the coupled rule with at least (1 - tv) / (1 + tv)."""
    tv = np.abs(law - law_of(load(home / "draft"))).sum(axis=1) / 2
    assert 0.1 < tv.mean() < 0.5
    rates = {}
    for rule in ("coupled", "token", "block"):
        completions = sampled(rule, "draft")
        drafts = first_drafts(completions)
        found, chances = (
            sum(accepted for _, accepted in drafts),
            [tv[before] for before, _ in drafts],
        )
        noise = SIGMAS * math.sqrt(len(drafts)) / 2
        most = sum(1 - each for each in chances)
        least = most if rule == "token" else sum((1 - each) / (1 + each) for each in chances)
        assert rule == "block" or least - noise < found < most + noise
        steps = [step for steps in completions for _, step in steps]
        rates[rule] = sum(step.accepted for step in steps) / sum(step.drafted for step in steps)
    assert rates["block"] > rates["token"] - 0.05


def test_lenience_accepts_more_and_moves_no_distribution_by_more_than_delta(
    sampled: Sample, law: Law
) -> None:
    rates = []
    for delta in (0.0, 0.1, 0.4):
        lenient = {"delta": delta} if delta else {}
        completions = sampled("token", "draft", **lenient)
        rates.append(np.mean([accepted for _, accepted in first_drafts(completions)]))
        counts = counts_of(completions)
        totals = counts.sum(axis=1, keepdims=True)
        noise = np.sqrt(law * (1 - law) * totals).sum() / 2
        assert np.abs(counts - law * totals).sum() / 2 < delta * totals.sum() + noise
    assert rates[0] < rates[1] < rates[2]
    with pytest.raises(AssertionError):
        assert_fits(counts, law)


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_lossy_rules_accept_what_they_may(sampled: Sample, law: Law, temperature: float) -> None:
    """The typical rule accepts tokens that are likelier than a threshold, which is lower where the
    entropy is high. At temperature 0, lenience accepts tokens that are nearly the likeliest."""
    threshold, alpha, delta = 0.3, 0.6, 0.5
    entropy = -(law * np.log(law)).sum(axis=1)
    limits = np.minimum(threshold, alpha * np.exp(-entropy))
    settings: dict[str, Any] = {"posterior_threshold": threshold, "posterior_alpha": alpha}
    rule = "typical"
    if temperature == 0:
        most = law.max(axis=1) * (1 - delta) ** (1 / TEMPERATURE)
        limits, settings, rule = most, {"delta": delta}, "token"
    completions = sampled(rule, "draft", temperature=temperature, **settings)
    seen = set()
    for steps in completions:
        for before, step in steps:
            for at, token in enumerate(step.tokens):
                if at < step.accepted:
                    assert law[before, token] > limits[before] * (1 - 1e-4)
                    seen.add((before, token))
                before = token
    assert len(seen) > 2
