"""Batches learn which size and which draft length bring the most tokens per second."""

from collections.abc import Callable

import pytest

from mlx_specdec.core import worth as costs
from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import generate_many
from mlx_specdec.engine.memory import AutoBatchSize
from mlx_specdec.engine.opening import candidate, drafters, pair_key
from mlx_specdec.engine.pair import Pair

from ..support.pairs import decoder_only, encoder_decoder, with_heads

FAMILIES = ("llama", "own-head-scaled")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return with_heads(
        encoder_decoder(request.param, 0.1)
        if request.param == "own-head-scaled"
        else decoder_only(request.param)
    )


@pytest.mark.parametrize("proposer", ["draft", "auto"])
def test_batches_save_what_they_learned_by_size(pair: Pair, proposer: str) -> None:
    options = Options(max_tokens=40, num_draft="auto", proposer=proposer, temperature=0.5)
    prompts = [[number + 5, 9, 11] for number in range(6)]
    generate_many(pair, prompts, options, batch_size=4)
    memory = costs.memory(pair_key(pair))
    [*_, drafter] = [one for one in drafters(pair, options) if one.name == "draft"]
    draft = candidate(drafter, options)
    verified, _ = memory.entries[f"acceptance {draft.text}"]
    assert memory.entries[f"costs of {draft.costs}, 4 rows, 0 doublings"] and verified[0] > 0


@pytest.mark.parametrize(
    ("rate", "most", "expected"),
    [
        (lambda size: size, 64, 64),
        (lambda size: size, 24, 16),
        (lambda size: min(size, 16), 64, 16),
        (lambda size: min(size, 4), 64, 4),
        (lambda size: 1.0, 64, 1),
        (lambda size: -abs(size - 32) + 100, 64, 32),
        (lambda size: 1 / size, 64, 1),
    ],
)
def test_the_size_of_batches_settles_where_most_tokens_come(
    rate: Callable[[int], float], most: int, expected: int
) -> None:
    size, seen = AutoBatchSize(most=most), set()
    for _ in range(12):
        seen.add(size.size)
        size.took(int(1000 * rate(size.size)), 1000.0)
    assert size.size == expected
    assert max(seen) <= most
