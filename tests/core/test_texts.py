"""Texts of tiny models under XTC and smaller caches."""

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache

from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import generate
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.pairs import PROMPT, Numbers, decoder_only, pair_of

LENGTH = 20


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
