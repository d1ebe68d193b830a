"""Texts of tiny models: what settings, ends and rules make of them."""

import sys
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache

from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import generate
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.proposers.text_index import BETWEEN, TextIndex

from ..support import tiny
from ..support.pairs import PROMPT, SIZE, Numbers, decoder_only, pair_for, pair_of

LENGTH = 20
LONGER = 48
"""Where something has to repeat, to be looked up."""


@pytest.mark.parametrize("family", ["llama", "own-head-scaled"])
def test_top_choices_are_excluded_from_draft_and_target_alike(family: str) -> None:
    sampling = {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.02, "seed": 3}
    plain = Options(max_tokens=LENGTH, regular=True, **sampling)
    target = pair_for(family).target
    pair = pair_of(target, target)
    without = replace(plain, xtc_probability=0.0)
    assert generate(pair, PROMPT, plain).tokens != generate(pair, PROMPT, without).tokens
    for rule in ("coupled", "token", "block"):
        options = replace(plain, regular=False, num_draft=4, proposer="draft", rule=rule)
        assert generate(pair, PROMPT, options).stats.acceptance_rate == 1.0


def test_line_ends_and_what_ends_a_text_are_never_excluded() -> None:
    class Lines(Numbers):
        def encode(self, text: str) -> list[int]:
            return [7] if text == "\n" else super().encode(text)

    pair = replace(decoder_only("llama"), tokenizer=Lines())
    # Two top choices everywhere, of which the likelier one is excluded unless it is special.
    biases = {7: 1e6, 8: 0.999e6}
    options = Options(
        max_tokens=20, temperature=1e3, xtc_probability=1.0, xtc_threshold=0.2, logit_bias=biases
    )
    excluded = generate(pair, PROMPT, replace(options, xtc_special_tokens=()))
    assert set(excluded.tokens) == {8}
    assert set(generate(pair, PROMPT, options).tokens) == {7, 8}
    ends = replace(decoder_only("llama"), eos_token_ids=frozenset({7}))
    assert generate(ends, PROMPT, options).finish_reason == "eos"


@pytest.mark.parametrize("length", [1, 30])
def test_plain_text_under_smaller_caches_is_that_of_mlx_lm(length: int) -> None:
    network = tiny.build("llama", head_dim=32)
    prompt = [2 + index * 7 % 60 for index in range(length)]

    def reference(**settings) -> tuple[int, ...]:
        steps = generate_step(mx.array(prompt), network, max_tokens=LENGTH, **settings)
        return tuple(token for token, _ in steps)

    def plain(caches: CacheSettings) -> tuple[int, ...]:
        pair = pair_of(DecoderOnlyModel(network, caches=caches), None)
        return generate(pair, prompt, Options(max_tokens=LENGTH, regular=True)).tokens

    quantized = reference(kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    assert plain(CacheSettings(8, 32)) == quantized
    windows = [RotatingKVCache(max_size=9, keep=0) for _ in network.layers]
    assert plain(CacheSettings(max_size=9)) == reference(prompt_cache=windows) != quantized


@pytest.mark.parametrize(
    ("family", "temperature"), [("llama", 0.7), ("mamba2", 0.0), ("own-head-scaled", 0.7)]
)
def test_documents_do_not_change_the_text(family: str, temperature: float) -> None:
    pair = pair_for(family)
    settings = {
        "max_tokens": LONGER,
        "temperature": temperature,
        "seed": 2,
        "frequency_penalty": 2.0,
    }
    plain = generate(pair, PROMPT, Options(regular=True, **settings))
    helpful = [*PROMPT, *plain.tokens[:32], 3, 3]
    misleading = [
        token for a, b in pairwise(plain.tokens) for token in (a, b, (b + 1) % SIZE, BETWEEN)
    ]
    rounds = []
    for texts in ([helpful, misleading], [misleading]):
        index = TextIndex(sys.maxsize)
        for text in texts:
            index.add([*text, BETWEEN])
        options = Options(proposer="ngram", num_draft=4, **settings)
        result = generate(replace(pair, documents=index), PROMPT, options)
        assert result.tokens == plain.tokens
        assert result.stats.drafted > result.stats.accepted
        rounds.append(result.stats.rounds)
    assert rounds[0] < rounds[1]
