"""`Options.exact`: a row has the same bits in every pass, although kernels round one row and
several rows differently. The kernels are those of tests/support/simulated_metal.py."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import (
    CacheSettings,
    Options,
    PromptCache,
    Result,
    generate,
    load,
    stream_generate,
)
from mlx_specdec.engine.pair import Pair
from mlx_specdec.models import exact
from mlx_specdec.models.attention_parts import in_single_rows
from mlx_specdec.models.base import Base
from mlx_specdec.models.distributed.leader import LedModel
from mlx_specdec.models.exact import ExactPasses, exactly
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.types import Context

from ..support import simulated_metal, tiny
from ..support.families import config_of
from ..support.pairs import PROMPT, decoder, decoder_only, pair_of, translator
from ..support.shipped import ROOT, prompts
from ..support.simulated_metal import off_cpu

PAIRS = {"py-llama": ("python.jsonl", 32), "t5-enfr": ("translation.jsonl", 12)}
"""Shipped pairs: a file in prompts/, and the tokens of the greedy output. Rows that attend together
change py-llama's 30th token. benchmarks/rounding.py --metal takes more prompts."""
KERNELS = {"ONE_PASS_KEYS": 24, "FEW": 5}
"""Sizes of the simulated kernels: more keys than a trial has, and as many rows as its passes."""
TOKENS = 36
"""Tokens of the sequences whose bits are compared. They exceed the keys above and all windows."""
MODELS: dict[str, Callable[[], Base]] = {
    "llama": lambda: fresh("llama"),
    "one key-value head": lambda: fresh("llama", num_key_value_heads=1),
    "windows": lambda: fresh("gemma3_wrapped"),
    "experts": lambda: fresh("qwen3_moe"),
    "quantized cache": lambda: DecoderOnlyModel(
        tiny.build("llama", head_dim=32), caches=CacheSettings(bits=8, group_size=32)
    ),
    "gated delta": lambda: family("qwen3_5"),
    "KDA and latent attention": lambda: family("kimi_linear"),
    "convolutions": lambda: family("lfm2"),
    "Mamba 2": lambda: family("mamba2"),
    "RWKV 7": lambda: family("rwkv7"),
    "linear attention": lambda: family("bailing_hybrid"),
    "gates of blocks": lambda: family("recurrent_gemma"),
    "latent attention": lambda: family("deepseek_v3"),
    "T5": lambda: translator("own-head-scaled"),
    "BART": lambda: translator("bart"),
    "T5Gemma 2": lambda: translator("../t5gemma2/grouped"),
}


def fresh(family: str, **changes: int) -> DecoderOnlyModel:
    """Make a tiny model that is off the CPU, so that it calls our attention."""
    return DecoderOnlyModel(tiny.build(family, **changes))


def family(name: str) -> DecoderOnlyModel:
    return DecoderOnlyModel(tiny.from_config(config_of(name)))


@pytest.fixture(scope="module")
def metal() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        off_cpu(patch)
        for name, size in KERNELS.items():
            patch.setattr(simulated_metal, name, size)
        simulated_metal.install(patch)
        yield


def rows_of(context: Context, sizes: Iterator[int]) -> list[mx.array]:
    """Return the logits of TOKENS positions. sizes: of the passes, some of whose rows are rewound
    and computed again in the next pass."""
    tokens = mx.random.randint(3, 60, (1, TOKENS), key=mx.random.key(1)).astype(mx.int32)
    rows: list[mx.array] = []
    # Both ways read the beginning in one pass, as decoding does.
    context.advance(tokens[:, :6])
    at = 6
    while at < TOKENS:
        part = tokens[:, at : at + next(sizes)]
        count = part.shape[1]
        logits = context.advance(part, proposed=count - 1).logits[0]
        stays = max(1, count - 2)
        context.rewind((at + stays,))
        rows += [logits[row] for row in range(stays)]
        at += stays
    mx.eval(rows)
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_rows_have_the_same_bits_in_passes_of_one_to_five_rows(metal: None, name: str) -> None:
    model = MODELS[name]()
    assert model.exact == ExactPasses(least=2, most=5)
    single = rows_of(exactly(model.open_batch([PROMPT]), 2), itertools.repeat(1))
    several = rows_of(exactly(model.open_batch([PROMPT]), 2), itertools.cycle((5, 2, 4, 1, 3)))
    assert all(mx.array_equal(*pair) for pair in zip(single, several, strict=True))


@pytest.mark.parametrize("name", ["llama", "T5"])
def test_without_it_the_simulated_kernels_change_bits(metal: None, name: str) -> None:
    """Otherwise the test above would prove nothing."""
    model = MODELS[name]()
    single = rows_of(model.open_batch([PROMPT]), itertools.repeat(1))
    several = rows_of(model.open_batch([PROMPT]), itertools.cycle((5, 2, 4, 1, 3)))
    assert not all(mx.array_equal(*pair) for pair in zip(single, several, strict=True))


def test_a_model_whose_own_attention_multiplies_all_rows_at_once_is_refused(metal: None) -> None:
    assert "its rows had other bits" in family("phi3small").exact.why_not


def test_a_product_of_few_rows_is_padded_and_no_other(metal: None) -> None:
    fresh("llama").exact  # noqa: B018  replaces the products
    states, weights = mx.random.normal((1, 5, 8)), mx.random.normal((8, 8))
    quantized = mx.quantize(mx.random.normal((8, 64)), 64, 8)
    wide = mx.random.normal((1, 5, 64))
    products = (
        lambda rows: states[:, rows] @ weights,
        lambda rows: mx.matmul(states[:, rows], weights),
        lambda rows: mx.addmm(weights[0], states[:, rows], weights),
        lambda rows: mx.quantized_matmul(wide[:, rows], *quantized, group_size=64, bits=8),
    )
    for product in products:
        outside = product(slice(1))
        with exact.exact_pass(2):
            single, several = product(slice(1)), product(slice(5))
        assert single.shape == (1, 1, 8) and several.shape == (1, 5, 8)
        assert mx.array_equal(single[0, 0], several[0, 0])
        assert mx.allclose(single, outside, atol=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_outputs_are_equal_under_other_rounding(metal: None, name: str) -> None:
    pair = load(ROOT / "weights" / name, ROOT / "weights" / f"{name}-draft")
    file, length = PAIRS[name]
    [prompt] = prompts(file, 1)
    plain, drafted = (
        generate(pair, prompt, Options(max_tokens=length, num_draft=count, exact=True))
        for count in (0, 3)
    )
    assert drafted.stats.drafted and drafted.tokens == plain.tokens


@pytest.mark.parametrize("name", ["llama", "windows", "gated delta", "T5"])
def test_outputs_are_equal_from_the_prefix_cache(metal: None, name: str) -> None:
    pair, cache = pair_of(MODELS[name](), None), PromptCache(1 << 26)
    options = Options(
        max_tokens=10, temperature=1.0, seed=5, exact=True, proposer="ngram", prefill_step_size=24
    )
    prompts = [[5 + place * place % 50 for place in range(length)] for length in (34, 54, 34)]
    prompts[2][28:] = [9] * 6
    whole = prompts[0]
    # The cache also holds what passes with other bits have computed.
    generate_from(cache, pair, whole, replace(options, exact=False))
    plain = [generate(pair, prompt, replace(options, regular=True)).tokens for prompt in prompts]
    for prompt, expected in zip(prompts * 2, plain * 2, strict=True):
        result = generate_from(cache, pair, prompt, options)
        assert result.tokens == expected
    assert result.labels.cached_tokens == (34 if name == "T5" else 24)


def generate_from(cache: PromptCache, pair: Pair, prompt: list[int], options: Options) -> Result:
    return stream_generate(pair, prompt, options, cache=cache).result()


class Passes:
    """A context that notes the number of rows of each pass; all else is the other context's."""

    def __init__(self, context: Context, rows: list[int]) -> None:
        self._context, self._rows = context, rows

    def __getattr__(self, name: str) -> object:
        return getattr(self._context, name)

    def advance(self, tokens: mx.array, proposed: int = 0, hidden: tuple[str, ...] = ()) -> object:
        self._rows.append(tokens.shape[1])
        return self._context.advance(tokens, proposed, hidden)


@pytest.mark.parametrize("how", ["plain", "drafted", "auto"])
def test_no_pass_has_more_rows_than_the_trial_allows(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    real = DecoderOnlyModel.open_batch
    pair = decoder_only("llama")
    assert pair.target.exact.most in (3, 5)
    monkeypatch.setattr(
        DecoderOnlyModel,
        "open_batch",
        lambda self, *arguments: Passes(
            real(self, *arguments), rows if self is pair.target else []
        ),
    )
    count = {"plain": 0, "drafted": 4, "auto": "auto"}[how]
    result = generate(pair, PROMPT, Options(max_tokens=60, num_draft=count, exact=True))
    assert len(result.tokens) == 60 and result.labels.exact
    prefill, *decoding = rows
    assert prefill == len(PROMPT) - 1
    assert max(decoding) <= pair.target.exact.most and len(decoding) > 10


class OneRowDiffers:
    """A context whose logits are the tokens, except for one row of passes of two to five rows, and
    for one of the inputs of a trial."""

    def __init__(self, row: int, differs: bool) -> None:
        self._row, self._differs = row, differs

    def advance(self, tokens: mx.array, proposed: int = 0) -> SimpleNamespace:
        rows = tokens.shape[1]
        other = self._differs and 1 < rows < 6 and mx.arange(rows) == self._row
        return SimpleNamespace(logits=mx.where(other, tokens + 1, tokens)[..., None])

    def rewind(self, lengths: tuple[int, ...]) -> None:
        pass


@pytest.mark.parametrize(("row", "most"), [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3)])
def test_a_trial_compares_every_row_of_every_input(row: int, most: int) -> None:
    opened = itertools.count()

    def differing() -> Any:
        return OneRowDiffers(row, next(opened) % 6 > 3)

    found = exact.try_exact(differing, 64)
    assert found.most == most and bool(found.why_not) == (most == 0)


def test_models_that_machines_share_are_refused() -> None:
    shared = LedModel(decoder("llama"), None, True, "")  # type: ignore[arg-type]
    assert "several machines" in shared.exact.why_not


def test_single_rows_see_what_a_pass_of_their_own_would_show_them() -> None:
    """Three rows after five keys, in a window of four."""
    keys = mx.arange(8).reshape(1, 1, 8, 1)
    mask = mx.arange(8) <= mx.arange(5, 8)[:, None]
    queries = mx.zeros((1, 2, 3, 1))
    for window, seen in ((None, [6, 7, 8]), (4, [4, 4, 4])):
        for shape in (mask[None, None], "causal"):
            parts = list(in_single_rows(queries, keys, keys, shape, window))
            assert [part[1].shape[2] for part in parts] == seen
            assert [part[1][0, 0, -1, 0].item() for part in parts] == [5, 6, 7]
            assert all(part[3] is None or part[3].all() for part in parts)
