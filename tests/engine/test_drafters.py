"""Who proposes for which pair, asked or not."""

import json
from dataclasses import replace
from typing import cast

import pytest

from mlx_specdec.draft_length import saved
from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.opening import (
    drafters,
    make_draft_length,
    make_proposer,
    pair_key,
    source,
)
from mlx_specdec.engine.pair import Pair
from mlx_specdec.models.base import Base
from mlx_specdec.options import Options
from mlx_specdec.proposers.drafter import Setup
from mlx_specdec.sampling.noise import SilentNoise

from ..support.lengths import teach
from ..support.models import make_llama
from ..support.pairs import with_heads

NOISE = SilentNoise().at(0, 0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return loading.load(make_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def pair(alone: Pair) -> Pair:
    return replace(alone, draft=alone.target, draft_name="draft")


def names(pair: Pair, **settings) -> tuple[str, ...]:
    return tuple(drafter.name for drafter in drafters(pair, Options(**settings)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("ngram", "draft", "medusa")),
        ({"proposer": "auto", "num_draft": 3}, ("ngram", "draft")),
        ({"num_draft": 3}, ("draft",)),
        ({"proposer": "medusa"}, ("medusa",)),
    ],
)
def test_of_a_draft_and_heads_the_first_is_taken_only_where_nothing_is_measured(
    settings: dict, expected: tuple[str, ...], pair: Pair
) -> None:
    assert names(with_heads(pair), **settings) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("ngram",)),
        ({"proposer": "auto", "num_draft": 3}, ("ngram",)),
        ({"num_draft": 3}, ("ngram",)),
        ({"num_draft": 0}, ()),
        ({"proposer": "none"}, ()),
        ({"regular": True}, ()),
    ],
)
def test_lookup_drafts_for_a_model_alone_unless_drafts_are_off(
    settings: dict, expected: tuple[str, ...], alone: Pair
) -> None:
    assert names(alone, **settings) == expected


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


def taught(pair: Pair, options: Options, cost: float) -> None:
    """As if earlier texts had found that a draft token costs so many plain steps, and that half of
    the tokens are accepted."""
    for drafter in drafters(pair, options):
        memory = saved.memory(pair_key(pair))
        teach(memory, source(drafter, options), lambda drafted: 1 + cost * drafted, 0.5)


@pytest.mark.parametrize("proposer", ["draft", "auto"])
def test_a_draft_that_is_parked_is_never_run(alone: Pair, proposer: str) -> None:
    counted = Counted(alone.target)
    pair = replace(alone, draft=cast(Base, counted), draft_name="slow")
    options = Options(max_tokens=30, proposer=proposer, temperature=1.5)
    taught(pair, options, 20.0)
    result = generate(pair, "hello", options)
    assert len(result.tokens) == 30
    assert (counted.opened, counted.passes) == (0, 0)


@pytest.mark.parametrize("proposer", ["draft", "auto"])
def test_a_proposer_that_a_caller_passes_teaches_nothing_of_the_pair(
    pair: Pair, proposer: str
) -> None:
    options = Options(max_tokens=12, proposer=proposer)
    text = generate(pair, "hello", options).tokens
    memory = saved.memory(pair_key(pair))
    before = json.dumps(memory.entries)
    [*_, draft] = drafters(pair, options)
    made = draft.make(Setup(options))
    assert stream_generate(pair, "hello", options, proposer=made).result().tokens == text
    assert json.dumps(memory.entries) == before


def test_texts_of_a_loaded_pair_learn_from_one_another_where_nothing_is_saved(alone: Pair) -> None:
    pair = replace(alone, draft=alone.target, draft_name="draft", learned=saved.Memory())
    options = Options(max_tokens=24, proposer="draft", cost_cache=False)
    generate(pair, [5, 6, 7], options)
    name, counts = next(
        entry for entry in pair.learned.entries.items() if entry[0].startswith("acceptance")
    )
    assert sum(counts[0]) > 0 and not saved.directory().exists()
    make_draft_length(pair, drafters(pair, options), options)
    assert pair.learned.entries[name] is counts and not alone.learned.entries


@pytest.mark.parametrize("num_draft", ["auto", 3])
def test_what_lost_badly_waits_for_a_longer_text(
    alone: Pair, num_draft: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(alone.target)
    pair = replace(alone, draft=cast(Base, counted), draft_name="dear")
    options = Options(max_tokens=12, proposer="draft", num_draft=num_draft)
    taught(pair, options, 3.0)
    texts = [generate(pair, "hello", options).stats.drafted for _ in range(3)]
    assert all(drafted > 0 for drafted in texts) == (num_draft == 3)
    assert (counted.opened == 0) == (num_draft == "auto")


def proposed(pair: Pair, repeated: int, **settings) -> tuple[str, list[int]]:
    """Source and tokens where the last `repeated` tokens came before, followed by 9."""
    options = Options(**{"proposer": "auto", "num_draft": 1, **settings})
    text = [5, 6, 7, 8][-repeated:]
    prompt = [*text, 9, 30, 31, *text]
    chosen = drafters(pair, options)
    lengths = make_draft_length(pair, chosen, options)
    proposer = make_proposer(chosen, options, lengths)
    assert proposer is not None and lengths.choose(100) == 1
    proposer.begin([prompt])
    proposal = proposer.propose([prompt], 1, NOISE)
    return proposal.source, proposal.tokens.tolist()[0]


def test_before_a_draft_lookup_trusts_longer_matches_only(pair: Pair, alone: Pair) -> None:
    assert proposed(pair, 4) == ("ngram", [9])
    assert proposed(pair, 3)[0] == "draft"
    assert proposed(pair, 2, ngram_min=2) == ("ngram", [9])
    assert proposed(alone, 2)[1] == [9]


def test_a_text_is_timed_in_parts_only_where_that_is_requested(pair: Pair) -> None:
    options = Options(max_tokens=40, num_draft=2)
    quick = generate(pair, "hello", options)
    assert quick.stats.timed_rounds == 0 and quick.stats.seconds.draft is None
    report = stream_generate(pair, "hello", options, timed=True).result()
    assert report.stats.timed_rounds > 0 and report.stats.seconds.draft is not None
    assert report.tokens == quick.tokens
