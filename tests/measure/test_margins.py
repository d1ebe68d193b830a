"""How close the choices of an output were: scored again, and against every other choice."""

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import margins as program
from benchmarks.margins import compare, cut_distance, lead, noise_of, score
from mlx_specdec.core.distribution import Distribution
from mlx_specdec.core.noise import CoupledNoise
from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair

from ..support.nothing import NO_DRAFT
from ..support.pairs import PROMPT, SIZE, decoder_only, pair_for

SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.9},
    "filtered": {"temperature": 1.2, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    "penalized": {"temperature": 0.7, "repetition_penalty": 1.4},
    "lenient": {"delta": 0.5},
}


def options(**settings: object) -> Options:
    return Options(**{"max_tokens": 12, "num_draft": 3, "cost_cache": False, **settings})


def expected(pair: Pair, settings: Options, tokens: tuple[int, ...]) -> list[float]:
    """The leads of the tokens of an output, from passes over one token and noise drawn singly."""
    text, found = list(pair.target.prefix(PROMPT)), []
    context = pair.target.open_batch([PROMPT])
    if text[:-1]:
        context.advance(mx.array([text[:-1]]))
    noise = CoupledNoise(settings.seed, SIZE, PROMPT)
    for position, token in enumerate(tokens):
        logits = context.advance(mx.array([text[-1:]])).logits
        law = Distribution(settings, SIZE, PROMPT)
        row = law.log_probabilities(logits, text, NO_DRAFT)[0, 0]
        if settings.temperature > 0:
            row = row + noise.at(0, position).target(1)[0, 0]
        assert settings.delta or mx.argmax(row).item() == token
        second, best = np.sort(np.array(row))[-2:]
        found.append(float(best - second))
        text.append(token)
    return found


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "mamba2", "own-head-scaled"])
def test_an_output_is_scored_with_the_noise_that_it_was_drawn_with(family: str, kind: str) -> None:
    pair = pair_for(family)
    settings = options(seed=3, **SETTINGS[kind])
    tokens = generate(pair, PROMPT, settings).tokens
    margins = score(pair, settings, PROMPT, tokens)
    leads = expected(pair, settings, tokens)
    assert margins is not None and len(margins.values) == len(margins.ties) == len(tokens)
    if settings.filters:
        assert all(value <= one + 1e-4 for value, one in zip(margins.values, leads, strict=True))
    else:
        assert margins.values == pytest.approx(leads, abs=1e-4)
    assert margins.smallest.value == min(margins.values)
    assert margins.as_dict()["tied_positions"] == sum(margins.ties)


def test_an_exact_output_is_scored_in_exact_passes() -> None:
    pair, settings = decoder_only("llama"), options(exact=True)
    tokens = generate(pair, PROMPT, settings).tokens
    margins = score(pair, settings, PROMPT, tokens)
    assert margins.values == pytest.approx(expected(pair, settings, tokens), abs=1e-4)


def test_positions_that_tie_within_the_measured_noise_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = decoder_only("llama")
    settings = options(max_tokens=1, logit_bias={5: 32.0, 6: 31.8})
    tokens = generate(pair, PROMPT, settings).tokens
    [value] = score(pair, settings, PROMPT, tokens).values
    assert score(pair, settings, PROMPT, tokens).ties == (False,)
    monkeypatch.setattr(program, "noise_of", lambda pair, *, exact: value)
    assert score(pair, settings, PROMPT, tokens).ties == (True,)


def test_the_noise_is_that_of_rounding_and_exact_passes_have_none() -> None:
    pair = decoder_only("llama")
    assert 0 <= noise_of(pair) < 1e-4 and noise_of(pair, exact=True) == 0


@pytest.mark.parametrize("at", [0, 7, 11])
def test_two_outputs_part_at_the_first_token_that_differs(at: int) -> None:
    pair, settings = decoder_only("llama"), options(temperature=0.8)
    tokens = generate(pair, PROMPT, settings).tokens
    changed = [*tokens[:at], (tokens[at] + 1) % SIZE, *tokens[at + 1 :]]
    margins = score(pair, settings, PROMPT, tokens)
    found = compare(pair, settings, PROMPT, tokens, changed)
    assert found.position == at and found.tie is margins.ties[at]
    assert found.margin == pytest.approx(margins.values[at], abs=1e-4)
    shorter = compare(pair, settings, PROMPT, tokens[:at], tokens)
    assert shorter.margin == pytest.approx(found.margin, abs=1e-4)


# A change smaller than the margin never changes the choice, and a cut that is near is seen.


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.3},
    {"min_p": 0.999},
    {"top_k": 6, "top_p": 0.8},
    {"top_k": 4, "min_p": 0.2},
    {"top_p": 0.7, "min_p": 0.1},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.05},
]


def margins(before: np.ndarray, gumbel: np.ndarray, settings: Options) -> np.ndarray:
    """Of rows (n, vocabulary): what decides between their choice and another one."""
    rows, noise = mx.array(before)[None], mx.array(gumbel)[None]
    scored = Distribution(settings, rows.shape[-1]).log_probabilities(rows, [], NO_DRAFT) + noise
    cut = cut_distance(scored, rows, noise, settings)
    return np.minimum(np.array(cut)[0], np.array(lead(scored))[0])


def choices(before: np.ndarray, gumbel: np.ndarray, settings: Options) -> np.ndarray:
    """The tokens that rows (n, vocabulary) choose."""
    law = Distribution(settings, before.shape[-1])
    filtered = law.log_probabilities(mx.array(before), [], NO_DRAFT)
    return np.array(mx.argmax(filtered + mx.array(gumbel), axis=-1))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_no_change_below_the_margin_changes_the_choice(filters: dict) -> None:
    settings = Options(temperature=1.0, **filters)
    random = np.random.default_rng(1)
    before = (1.5 * random.normal(size=(400, 12))).astype(np.float32)
    gumbel = random.gumbel(size=before.shape).astype(np.float32)
    most = margins(before, gumbel, settings)
    chosen = choices(before, gumbel, settings)
    assert np.isfinite(most).all() and (most >= 0).all()
    closest = np.full(len(before), np.inf)
    for turn in range(300):
        # Differences between two entries change by twice what one entry does.
        size = random.choice([0.499, 0.6, 1.0]) * np.minimum(most, 5.0)[:, None]
        signs = random.choice([-1, 1], size=before.shape)
        parts = 1.0 if turn % 2 else random.uniform(size=before.shape)
        shifted = (before + size * signs * parts).astype(np.float32)
        changed = choices(shifted, gumbel, settings) != chosen
        change = 2 * np.abs(shifted - before).max(axis=1)
        closest = np.where(changed, np.minimum(closest, change), closest)
    assert (closest >= most - 1e-5).all()
    # And it is not less than it has to be: for nearly all, chance finds a change of twice it.
    assert (closest <= 2.1 * most).mean() > 0.9
