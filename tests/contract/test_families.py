"""Every family of mlx-lm writes the same text alone, drafted and in a batch, whatever of a draft is
rejected."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx.utils import tree_flatten

from mlx_specdec import (
    DecodingError,
    OptionError,
    Options,
    Proposal,
    Proposer,
    Request,
    generate,
    generate_many,
    load,
    stream_generate,
    stream_many,
)

from ..support import tiny
from ..support.families import DIFFERENT, NOT_TINY, ONE_AT_A_TIME, config_of
from ..support.speculators import eagle3
from ..support.tokenizers import byte_level
from .support import moved, numbered, quick, served

PROMPT = [5, 9, 12, 7, 33, 21, 8]
LENGTH = 11
# With tied random weights, some repeat one token; a penalty makes texts worth comparing. None ends.
OPTIONS = Options(
    max_tokens=17,
    temperature=1.0,
    seed=3,
    num_draft=3,
    frequency_penalty=2.0,
    logit_bias={1: -math.inf},
    cost_cache=False,
)
MOST_NUMBERS = 2_000_000
"""A model with more weights has kept a default that is not tiny."""


QUICK = (
    *("baichuan_m1", "deepseek_v3", "falcon_h1", "gemma3_text", "gpt_oss", "kimi_linear", "lfm2"),
    *("llama", "llama4", "mamba2", "qwen3_next", "recurrent_gemma", "rwkv7"),
)
"""One family of each kind of cache, and of each mixture of kinds. test_configurations.py has the
others."""
REFUSED = ("deepseek_v32", "gemma2", "glm_moe_dsa", "iquestloopcoder", "phi3small", "plamo2")
"""Their rows have other bits in passes over several rows, on a CPU with MKL."""


def names() -> list[str]:
    """The modules of mlx-lm that define a model; to import them all takes seconds. llama4_text is a
    part of llama4."""
    files = Path(mlx_lm.models.__path__[0]).glob("*.py")
    models = (file.stem for file in files if "class ModelArgs" in file.read_text(encoding="utf-8"))
    return sorted(set(models) - set(NOT_TINY) - {"llama4_text"})


def written(name: str, directory: Path) -> Path:
    """Write a tiny model of a family."""
    config, directory = config_of(name), directory / "target"
    weights = dict(tree_flatten(tiny.from_config(config).parameters()))
    assert sum(array.size for array in weights.values()) < MOST_NUMBERS
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return numbered(directory, config.get("vocab_size", tiny.VOCABULARY))


class Family(NamedTuple):
    """A family's name, a pair of it whose draft model differs a little, and the tokens that plain
    decoding writes after PROMPT with OPTIONS."""

    name: str
    pair: Any
    text: tuple[int, ...]


@pytest.fixture(scope="module", params=quick(names(), *QUICK))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    target = written(request.param, tmp_path_factory.mktemp("family"))
    pair = load(target, moved(target, target.with_name("draft")))
    text = generate(pair, PROMPT, replace(OPTIONS, regular=True)).tokens
    return Family(request.param, pair, text)


class HalfRight(Proposer):
    """Proposes `count` tokens, of which 0, 1, ... and finally all are those of a text."""

    def __init__(self, prompt: list[int], text: tuple[int, ...], count: int) -> None:
        self._text, self._count, self._right = [*prompt, *text], count, 0

    def propose(self, committed: Any, limit: int, noise: Any) -> Proposal:
        [tokens] = committed
        ahead = self._text[len(tokens) :][: min(limit, self._count)]
        right = self._right % (self._count + 1)
        self._right += 1
        return Proposal.one_hot([[*ahead[:right], *((token + 1) % 60 for token in ahead[right:])]])


# The third joins when the second has ended; the first two are longer than a window.
REQUESTS = [
    Request(PROMPT, replace(OPTIONS, max_tokens=LENGTH)),
    Request(PROMPT[:2], replace(OPTIONS, temperature=0.7, max_tokens=LENGTH - 2, seed=5)),
    Request([*PROMPT, *PROMPT[1:]], replace(OPTIONS, temperature=0.0, max_tokens=6)),
]


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_a_family_writes_the_same_texts_alone_drafted_and_in_a_batch(family: Family) -> None:
    name, pair, text = family
    plain = [text[:LENGTH]]
    for one in REQUESTS[1:]:
        plain.append(generate(pair, one.prompt, replace(one.options, regular=True)).tokens)
    assert all(len(set(tokens)) > 2 for tokens in plain[:2]), "one token proves little"
    run = stream_many(pair, REQUESTS, OPTIONS, batch_size=2)
    results = {step.number: step.result for step in run if step.result is not None}
    assert [results[number].tokens for number in range(3)] == plain
    assert bool(run.why_not) is (name in ONE_AT_A_TIME)
    drafts = any(one.stats.drafted > one.stats.accepted for one in results.values())
    assert drafts is (name not in DIFFERENT)
    result = generate(pair, PROMPT, replace(OPTIONS, max_tokens=7))
    assert result.tokens == text[:7] and (result.stats.drafted > 0) is drafts


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_whatever_is_rejected_a_family_goes_on_as_in_plain_decoding(family: Family) -> None:
    name, pair, text = family
    drafting = HalfRight(PROMPT, text, 4)
    run = stream_generate(pair, PROMPT, replace(OPTIONS, num_draft=4), proposer=drafting)
    accepted = [step.accepted for step in run]
    result = run.result()
    assert result.tokens == text and result.stats.target_passes == result.stats.rounds
    assert {*accepted} >= {0, 1, 2, 3, 4} or name in DIFFERENT


EXACT = replace(OPTIONS, exact=True, max_tokens=13, num_draft=2)


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_with_exact_a_family_writes_the_same_text_whatever_is_rejected(family: Family) -> None:
    name, pair, _ = family
    try:
        plain = generate(pair, PROMPT, replace(EXACT, regular=True))
    except OptionError as problem:
        assert name in REFUSED and "in a trial its rows had other bits" in str(problem)
        return
    run = stream_generate(pair, PROMPT, EXACT, proposer=HalfRight(PROMPT, plain.tokens, 2))
    accepted = [step.accepted for step in run]
    assert run.result().tokens == plain.tokens and {*accepted} >= {0, 1, 2}
    assert run.result().labels.exact


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_exact_is_refused_for_a_model_whose_rows_differ(tmp_path: Path) -> None:
    """phi3small adds a mask of True and False to the scores of several rows."""
    pair = load(written("phi3small", tmp_path))
    with pytest.raises(OptionError, match=r"exact is impossible for .*its rows had other bits"):
        generate(pair, PROMPT, EXACT)
    with pytest.raises(DecodingError, match=r"prompt 1: exact is impossible for .*: "):
        generate_many(pair, [Request(PROMPT, PLAIN), Request(PROMPT, EXACT)])


def test_a_server_and_a_request_can_ask_for_exact(tmp_path: Path) -> None:
    model = written("phi3small", tmp_path)
    byte_level(model)
    with served("--model", model, "--exact", waits=False) as server:
        server.waits_for("exact is impossible")
    assert "error: exact is impossible for this model: " in server.log[-1]
    with served("--model", model) as server:
        asks = partial(server.ask, "/v1/completions")
        refused = asks({"prompt": PROMPT, "max_tokens": 2, "exact": True})
        assert refused.status == 400 and b"exact is impossible for this" in refused.body
        assert asks({"prompt": PROMPT, "max_tokens": 2}).status == 200


CLOSED = ("deepseek_v41", "gemma3n", "gpt_neox", "iquestloopcoder", "lille-130m")
"""Their layers return several streams, or their heads lie inside: refused by name."""
WIDTHS = ("hidden_size", "d_model", "n_embd", "hidden_dim", "model_dim", "dim")
PLAIN = replace(OPTIONS, temperature=0.0, max_tokens=6, frequency_penalty=0.0, regular=True)


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_a_family_shows_a_drafter_its_hidden_states_or_is_refused_by_name(
    family: Family, tmp_path: Path
) -> None:
    """A drafter, and heads that add nothing to the last hidden state: these repeat the target's own
    choice."""
    name, target = family.name, Path(family.pair.name)
    config = json.loads((target / "config.json").read_text())
    sizes = config.get("text_config", {}) | config
    width = next(sizes[key] for key in WIDTHS if key in sizes)
    drafter = eagle3(tmp_path / "1", drafted=None, vocabulary=family.pair.vocabulary, width=width)
    if name in CLOSED:
        with pytest.raises(OptionError, match=rf"type {name} do not show"):
            load(target, drafter)
        return
    zeros = {f"{n}.0.linear.weight": mx.zeros((width, width)) for n in range(3)}
    zeros |= {f"{n}.0.linear.bias": mx.zeros((width,)) for n in range(3)}
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": str(target)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "medusa_lm_head.safetensors"), zeros)
    pair, drafting = load(tmp_path, drafter), replace(PLAIN, regular=False)
    result = generate(pair, PROMPT, replace(drafting, proposer="eagle3"))
    assert result.tokens == generate(family.pair, PROMPT, PLAIN).tokens
    assert (result.stats.drafted > 0) is (name not in DIFFERENT)
    choice = generate(family.pair, PROMPT[:-1], replace(PLAIN, max_tokens=1)).tokens
    tokens = generate(pair, PROMPT, replace(drafting, proposer="medusa", delta=1.0)).tokens
    assert tokens[:3] == choice * 3 or name in DIFFERENT
