"""Every family of mlx-lm that can be made tiny writes the same text with speculation as without.

One table of small numbers suits nearly all: mlx-lm takes from a config the keys that it knows.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.engine.generate import generate, generate_many
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import Request
from mlx_specdec.errors import OptionError
from mlx_specdec.interfaces import FINAL, after
from mlx_specdec.models.mlx_lm.latent import absorbed_calls, expanding
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.options import Options

from ..support import tiny
from ..support.families import (
    DIFFERENT,
    NOT_TINY,
    config_of,
)
from ..support.pairs import PROMPT, pair_of, perturbed

pytestmark = pytest.mark.slow
LENGTH = 11
MOST_NUMBERS = 2_000_000
"""A model with more weights has kept a default that is not tiny."""


def names() -> list[str]:
    """The modules of mlx-lm that define a model; to import them all takes seconds."""
    files = Path(mlx_lm.models.__path__[0]).glob("*.py")
    models = (file.stem for file in files if "class ModelArgs" in file.read_text(encoding="utf-8"))
    return sorted(set(models) - set(NOT_TINY))


class Family(NamedTuple):
    """name: the module of mlx-lm. pair: tiny networks that differ."""

    name: str
    pair: Pair


# Made once for all tests of a family, which pytest runs one after the other.
@pytest.fixture(scope="module", params=names())
def family(request: pytest.FixtureRequest) -> Family:
    name: str = request.param
    target = tiny.from_config(config_of(name))
    draft = perturbed(tiny.from_config(config_of(name)), 0.3)
    return Family(name, pair_of(DecoderOnlyModel(target), DecoderOnlyModel(draft)))


ONE_AT_A_TIME = {
    **dict.fromkeys(("afm7", "gpt_bigcode", "phi3small"), "one position or mask for all sequences"),
    **dict.fromkeys(("deepseek_v41", "llama4"), "caches of their own"),
    "longcat_flash_ngram": "the state of short sequences is shorter",
    "recurrent_gemma": "the first token is normalized in another way",
}
"""Families that decode one sequence at a time, and why."""


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_every_family_writes_the_same_texts_in_batches(family: Family) -> None:
    name, pair = family
    network = pair.target.network
    assert sum(array.size for _, array in tree_flatten(network.parameters())) < MOST_NUMBERS
    assert bool(pair.target.why_not_batched) is (name in ONE_AT_A_TIME)
    # With tied random weights, some repeat one token; a penalty makes texts worth comparing.
    options = Options(num_draft=3, frequency_penalty=2.0)
    # The third joins when the second has ended; the first two are longer than a window.
    requests = [
        Request(PROMPT, replace(options, temperature=1.0, max_tokens=LENGTH, seed=3)),
        Request(PROMPT[:2], replace(options, temperature=0.7, max_tokens=LENGTH - 2, seed=5)),
        Request([*PROMPT, *PROMPT[1:]], replace(options, temperature=0.0, max_tokens=6)),
    ]
    plain = [
        generate(pair, each.prompt, replace(each.options, regular=True)).tokens for each in requests
    ]
    assert all(len(set(tokens)) > 2 for tokens in plain[:2]), "one token proves little"
    assert pair.target._absorbs is pair.draft._absorbs is bool(expanding(network))
    before = absorbed_calls()
    results = list(generate_many(pair, requests, options, batch_size=2))
    assert (absorbed_calls() > before) is bool(expanding(network))
    assert [each.tokens for each in results] == plain
    drafts = any(each.stats.drafted > each.stats.accepted for each in results)
    assert drafts is (name not in DIFFERENT)
    assert pair.target.rows_agree is (name not in DIFFERENT)


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_every_family_writes_the_same_text_alone(family: Family) -> None:
    name, pair = family
    options = Options(num_draft=3, temperature=1.0, max_tokens=LENGTH, seed=3)
    plain = generate(pair, PROMPT, replace(options, regular=True)).tokens
    result = generate(pair, PROMPT, options)
    assert result.tokens == plain
    assert (result.stats.drafted > 0) is (name not in DIFFERENT)


CLOSED = ("deepseek_v41", "gemma3n", "gpt_neox", "iquestloopcoder", "lille-130m")
"""Their layers return several streams, or their heads lie inside: refused by name."""


def test_every_family_shows_its_hidden_states_or_is_refused_by_name(family: Family) -> None:
    model = family.pair.target
    layers, fed = [after(layer) for layer in range(model.layers)], mx.array([[5, 9, 4]])
    plain = model.open([5]).advance(fed).logits
    if family.name in CLOSED:
        with pytest.raises(OptionError, match=rf"type {family.name} do not show"):
            model.open([5]).advance(fed, taps=(*layers, FINAL))
        return
    scores = model.open([5]).advance(fed, taps=(*layers, FINAL))
    assert mx.array_equal(scores.logits, plain)
    shapes = {scores.hidden[layer].shape for layer in layers}
    assert shapes == {(1, 3, model.width)} == {model.embed(fed).shape}
    assert mx.allclose(model.head(scores.hidden[FINAL]), scores.logits, atol=1e-3)
