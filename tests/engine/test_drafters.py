"""The drafters of a pair, and what is learned about them."""

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from mlx_specdec import system
from mlx_specdec.core import worth as costs
from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.core.worth import Memory
from mlx_specdec.engine import loading
from mlx_specdec.engine.drafters import drafters, make_proposer, measured, pair_key, worth_of
from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.models.base import Base
from mlx_specdec.types import Proposal, Proposer

from ..support.lengths import teach
from ..support.models import make_llama
from ..support.rows import row_of

NOISE = SilentNoise().at(0, 0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return loading.load(make_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def pair(alone: Pair) -> Pair:
    return replace(alone, draft=alone.target, draft_name="draft")


def names(pair: Pair, **settings) -> tuple[str, ...]:
    return tuple(drafter.name for drafter in drafters(pair, Options(**settings)))


class Counted:
    """A model that counts the contexts that were opened of it, and their passes."""

    def __init__(self, model: Base) -> None:
        self._model = model
        self.opened = self.passes = 0

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def reaching(self, length: int):
        return self

    def open_batch(self, prompts, cached):
        self.opened += 1
        context = self._model.open_batch(prompts, cached)
        advance = context.advance

        def counted(*args, **named):
            self.passes += 1
            return advance(*args, **named)

        context.advance = counted
        return context


@pytest.mark.parametrize(
    ("settings", "parked"),
    [
        ({"proposer": "draft"}, True),
        ({"proposer": "auto"}, True),
        ({"proposer": "draft", "num_draft": 3}, False),
    ],
)
def test_a_draft_that_has_been_too_expensive_is_never_run_unless_its_length_is_fixed(
    alone: Pair, settings: dict, parked: bool
) -> None:
    counted = Counted(alone.target)
    pair = replace(alone, draft=cast(Base, counted), draft_name="slow")
    options = Options(max_tokens=30, temperature=1.5, **settings)
    memory = costs.memory(pair_key(pair))
    for drafter in drafters(pair, options):
        # So many plain steps that no stall of a busy machine makes the draft look cheap.
        teach(memory, measured(pair, drafter, options), lambda drafted: 1 + 300.0 * drafted, 0.5)
    for _ in range(3):
        assert (generate(pair, "hello", options).stats.drafted == 0) is parked
    assert ((counted.opened, counted.passes) == (0, 0)) is parked


def test_a_proposer_that_a_caller_passes_teaches_nothing_of_the_pair(pair: Pair) -> None:
    class Fives(Proposer):
        def propose(self, committed: Any, limit: int, noise: Any) -> Proposal:
            return Proposal.one_hot([[5] * limit])

    options = Options(max_tokens=12, proposer="draft")
    tokens = generate(pair, "hello", options).tokens
    memory = costs.memory(pair_key(pair))
    before = json.dumps(memory.entries)
    assert stream_generate(pair, "hello", options, proposer=Fives()).result().tokens == tokens
    assert json.dumps(memory.entries) == before


def test_completions_of_a_loaded_pair_learn_from_one_another_if_nothing_is_saved(
    alone: Pair,
) -> None:
    pair = replace(alone, draft=alone.target, draft_name="draft", learned=Memory())
    options = Options(max_tokens=24, proposer="draft", cost_cache=False)
    generate(pair, [5, 6, 7], options)
    [name] = [name for name in pair.learned.entries if name.startswith("acceptance")]
    counts = pair.learned.entries[name]
    assert sum(counts[0]) > 0 and not system.cache_directory("draft-length").exists()
    worth_of(pair, drafters(pair, options), options)
    assert pair.learned.entries[name] is counts


def proposed(pair: Pair, repeated: int, **settings: Any) -> tuple[str, list[int]]:
    """Return the proposer and the tokens if the last `repeated` tokens came before, and then 9."""
    options = Options(**{"proposer": "auto", "num_draft": 1, **settings})
    tokens = [5, 6, 7, 8][-repeated:]
    row = row_of([*tokens, 9, 30, 31, *tokens], pair.vocabulary, options)
    chosen = drafters(pair, options)
    worth = worth_of(pair, chosen, options)
    proposer = make_proposer(chosen, worth)
    assert worth.choose(100) == 1
    proposal = proposer.propose([row], [1], NOISE)
    return proposal.source, proposal.tokens.tolist()[0]


def test_before_a_draft_lookup_trusts_longer_matches_only(pair: Pair, alone: Pair) -> None:
    assert proposed(pair, 4) == ("ngram", [9])
    assert proposed(pair, 3)[0] == "draft"
    assert proposed(pair, 2, ngram_min=2) == ("ngram", [9])
    assert proposed(alone, 2)[1] == [9]
