"""A drafter that is hardly ever right is named once, wherever texts are made."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_specdec.engine.generate import generate, generate_many, stream_generate
from mlx_specdec.engine.memory import BatchSize
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import Request
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.options import Options
from mlx_specdec.proposers.hidden_state import HiddenStateDrafter

from ..support import tiny
from ..support.drafter_pairs import made, target_of
from ..support.pairs import PROMPT, SIZE, Numbers

OPTIONS = Options(max_tokens=26, num_draft=4, frequency_penalty=1.0, cost_cache=False)
"""Long enough for a trial: 64 drafted tokens."""
SHORT = replace(OPTIONS, max_tokens=6)
HARDLY = "hardly any draft tokens are accepted"


def warnings_of(call: Callable[[], object]) -> list[str]:
    """What a call warns of drafters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    mine = [warning for warning in caught if HARDLY in str(warning.message)]
    assert all(warning.category is RuntimeWarning for warning in mine)
    return [str(warning.message) for warning in mine]


@pytest.fixture
def wrong(tmp_path: Path) -> Pair:
    """A drafter of random weights."""
    return made("eagle3", "llama", tmp_path)


def with_draft(seed: int) -> Pair:
    """A Llama with one of another seed, or itself (0), as its draft model."""
    target, draft = target_of("llama"), DecoderOnlyModel(tiny.build("llama", seed))
    return Pair("target", "draft", target, draft, Numbers(), frozenset(), SIZE, "float32", 0.0)


def test_a_drafter_on_hidden_states_is_named_with_all_causes_once_a_pair(wrong: Pair) -> None:
    [line] = warnings_of(lambda: generate(wrong, PROMPT, OPTIONS))
    assert "drafter was probably made for another target" in line and "\n" not in line
    assert "benchmarks/probe.py" in line
    assert warnings_of(lambda: generate(wrong, PROMPT, OPTIONS)) == []
    with_others = replace(OPTIONS, extra_eos_token="40", seed=3)
    assert warnings_of(lambda: generate(wrong, [4, 5], with_others)) == []


def test_a_draft_model_is_named_without_what_it_cannot_be() -> None:
    [line] = warnings_of(lambda: generate(with_draft(5), PROMPT, OPTIONS))
    assert "draft was probably made for another target" in line and "layers" not in line


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_tokens": 10}, id="too little was drafted"),
        pytest.param({"temperature": 1.5}, id="hot texts are hard to guess"),
        pytest.param({"regular": True}, id="plain decoding"),
        pytest.param({"proposer": "ngram", "ngram_min": 1}, id="lookup has no target"),
    ],
)
def test_texts_that_say_nothing_of_a_drafter_do_not_count(wrong: Pair, settings: dict) -> None:
    assert warnings_of(lambda: generate(wrong, PROMPT, replace(OPTIONS, **settings))) == []
    assert len(warnings_of(lambda: generate(wrong, PROMPT, OPTIONS))) == 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_in_a_batch_it_is_named_once(wrong: Pair, batch_size: int) -> None:
    prompts = [[3 + at] for at in range(10)]
    lines = warnings_of(lambda: generate_many(wrong, prompts, SHORT, batch_size=batch_size))
    assert len(lines) == 1


def test_of_requests_that_come_one_by_one_it_is_named_once(wrong: Pair) -> None:
    def served() -> None:
        run = Scheduler(wrong, None, SHORT, BatchSize(2))
        for number in range(10):
            run.add(number, Request([3 + number], SHORT, prediction=(9, 9, 9)))
        while not run.idle:
            run.step()

    assert len(warnings_of(served)) == 1


def test_a_proposer_of_the_callers_own_is_not_judged(wrong: Pair) -> None:
    assert wrong.drafter_network is not None
    proposer = HiddenStateDrafter(wrong.drafter_network, OPTIONS, SIZE)
    run = stream_generate(wrong, PROMPT, replace(OPTIONS, num_draft=4), proposer=proposer)
    assert warnings_of(run.result) == []
