"""A proposer with a name, added as CONTRIBUTING.md shows."""

import re
from pathlib import Path

import pytest

from mlx_specdec.core import options as settings
from mlx_specdec.core.options import Options
from mlx_specdec.core.proposer import Drafter
from mlx_specdec.engine import drafters as table
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import OptionError
from mlx_specdec.models.drafters import DRAFTER_KINDS

from ..support.drafter_pairs import MAKERS
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


def test_a_module_and_an_entry_in_the_table_make_a_name_for_the_options(
    pair: Pair, temperature: float, own_tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match="proposer must be one of"):
        Options(proposer="repeat")
    drafter = Drafter("repeat", lambda setup: repeat.Repeat())
    available = table.available
    monkeypatch.setattr(table, "available", lambda pair: [*available(pair), drafter])
    monkeypatch.setattr(settings, "PROPOSERS", (*settings.PROPOSERS, "repeat"))
    result = generate(
        pair, "some words", Options(**SETTINGS, proposer="repeat", temperature=temperature)
    )
    assert result.tokens == own_tokens
    assert result.labels.proposer == "repeat"
    assert result.stats.drafted > 0


def test_every_kind_of_drafter_has_a_name() -> None:
    assert set(settings.PROPOSERS) == {"ngram", "draft", "medusa", *DRAFTER_KINDS}
    assert set(DRAFTER_KINDS) == {*MAKERS, "gemma4_assistant"}


def test_the_docs_show_the_proposer_that_is_tested() -> None:
    section = DOCS.read_text(encoding="utf-8").split("## Where new things go: a proposer")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    assert Path(repeat.__file__).read_text(encoding="utf-8").endswith(block[1])
