"""Noise comes from keys that name their purpose, and no key is used twice."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.core.noise import (
    NOISE_NUMBERS,
    NOISE_ROWS,
    CoupledNoise,
    IndependentNoise,
    digest_of,
    tossed,
)


@pytest.mark.parametrize("vocabulary", [11, 5000, NOISE_NUMBERS + 1])
def test_noise_of_a_position_is_that_of_its_key_however_much_is_requested(vocabulary: int) -> None:
    prompt = [5, 6, 7]
    rows = CoupledNoise(3, vocabulary, prompt).at(0, 3).target(2 * NOISE_ROWS)
    settings = CoupledNoise(3, vocabulary, prompt)
    for position in range(3, 3 + 2 * NOISE_ROWS):
        key = IndependentNoise(3, vocabulary, prompt).key("gumbel", position)
        alone = mx.random.gumbel((vocabulary,), key=key)
        assert mx.array_equal(rows[0, position - 3], alone)
        noise = settings.at(0, position)
        assert mx.array_equal(noise.draft(0)[0, 0], alone)
        assert mx.array_equal(noise.target(3)[0, 0], alone)


def test_positions_and_seeds_share_no_noise() -> None:
    rows = CoupledNoise(3, 50).at(0, 0).target(40)[0]
    of_another_seed = CoupledNoise(4, 50).at(0, 0).target(40)[0]
    values = set(mx.concatenate([rows, of_another_seed]).flatten().tolist())
    assert len(values) > 0.999 * 80 * 50


@pytest.mark.parametrize("seed", [0, 3])
def test_one_seed_couples_neither_two_prompts_nor_a_text_and_its_continuation(seed: int) -> None:
    size, count, prompt = 40, 600, [5, 6, 7]

    def texts(*prompts: list[int]) -> list[list[int]]:
        """Return the texts of a flat distribution, which noise alone decides."""
        sources = (CoupledNoise(seed, size, ids) for ids in prompts)
        return [mx.argmax(one.at(0, 0).target(count)[0], axis=-1).tolist() for one in sources]

    first, again, different = texts(prompt, list(np.array(prompt)), [5, 6, 8])
    assert first == again
    [continued] = texts([*prompt, *first[:12]])
    for one, another in ((first, different), (first, continued), (first[12:], continued)):
        same = sum(a == b for a, b in zip(one, another, strict=False))
        assert same < 4 * count / size
    used = IndependentNoise(seed, size, prompt).at(0, 0).accept(50)
    assert not mx.any(used == IndependentNoise(seed, size, [5, 6, 8]).at(0, 0).accept(50))


def test_coins_depend_on_seed_prompt_and_position_and_come_up_as_often_as_requested() -> None:
    def tosses(seed: int, prompt: list[int], probability: float = 0.3) -> np.ndarray:
        digest = digest_of(prompt)
        return np.array([tossed(seed, digest, place, probability) for place in range(4000)])

    first = tosses(1, [5, 6])
    assert np.array_equal(first, tosses(1, [5, 6]))
    assert abs(first.mean() - 0.3) < 0.03
    assert abs((first[1:] & first[:-1]).mean() - 0.09) < 0.02
    for other in (tosses(2, [5, 6]), tosses(1, [5, 7])):
        assert abs((first & other).mean() - 0.09) < 0.02
    assert not tosses(1, [5], 0.0).any() and tosses(1, [5], 1.0).all()
