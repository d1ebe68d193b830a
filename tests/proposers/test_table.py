"""A proposer of one's own, added in the two ways that CONTRIBUTING.md shows."""

import re
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec import proposers as drafting
from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import DecodingError, OptionError
from mlx_specdec.interfaces import Proposal, Proposer
from mlx_specdec.options import Options

from ..support.models import make_llama, make_t5
from . import repeat

DOCS = Path(__file__).parents[2] / "CONTRIBUTING.md"
SETTINGS = {"max_tokens": 60, "num_draft": 3, "cost_cache": False}


@pytest.fixture(scope="module", params=[make_llama, make_t5])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load(request.param(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", params=[0.0, 1.0])
def temperature(request) -> float:
    return request.param


@pytest.fixture(scope="module")
def own_tokens(pair: Pair, temperature: float) -> tuple[int, ...]:
    """The target's own completion."""
    options = Options(max_tokens=60, regular=True, temperature=temperature)
    return generate(pair, "some words", options).tokens


def test_a_class_with_propose_alone_is_handed_to_stream_generate(
    pair: Pair, temperature: float, own_tokens: tuple[int, ...]
) -> None:
    options = Options(**SETTINGS, temperature=temperature)
    run = stream_generate(pair, "some words", options, proposer=repeat.Repeat())
    list(run)
    result = run.result()
    assert result.tokens == own_tokens
    assert result.labels.proposer == "Repeat"
    assert result.stats.drafted > 0


@pytest.mark.parametrize("token", [-1, 1 << 30, None])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_token_that_the_target_does_not_have_is_an_error(
    pair: Pair, temperature: float, token: int | None, on_host: bool
) -> None:
    """None stands for the first id after the target's."""
    beyond = pair.target.vocabulary if token is None else token

    class Careless(Proposer):
        def propose(self, committed, limit, noise) -> Proposal:
            drafted = [[0, beyond][:limit]]
            return Proposal.one_hot(drafted) if on_host else Proposal(mx.array(drafted))

    options = Options(**{**SETTINGS, "num_draft": 2}, temperature=temperature)
    run = stream_generate(pair, "some words", options, proposer=Careless())
    with pytest.raises(DecodingError, match="Careless proposed a token that the target"):
        run.result()


def test_a_module_and_a_line_in_the_table_make_a_name_for_the_options(
    pair: Pair, temperature: float, own_tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match="proposer must be one of"):
        Options(proposer="repeat")
    monkeypatch.setitem(sys.modules, "mlx_specdec.proposers.repeat", repeat)
    monkeypatch.setitem(drafting.DRAFTERS, "repeat", "repeat")
    result = generate(
        pair, "some words", Options(**SETTINGS, proposer="repeat", temperature=temperature)
    )
    assert result.tokens == own_tokens
    assert result.labels.proposer == "repeat"
    assert result.stats.drafted > 0


def test_the_docs_show_the_proposer_that_is_tested() -> None:
    section = DOCS.read_text(encoding="utf-8").split("## Where new things go: a proposer")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    assert Path(repeat.__file__).read_text(encoding="utf-8").endswith(block[1])
