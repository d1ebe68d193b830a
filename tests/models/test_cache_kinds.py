"""Quantised caches and windows of a given size: what they are, and who refuses them."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from mlx_specdec.errors import OptionError
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel, cache_maker

from ..support import tiny


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"bits": 5}, "kv-bits"),
        ({"bits": 8, "group_size": 48}, "kv-group-size"),
        ({"max_size": 0}, "max-kv-size"),
        ({"bits": 8, "max_size": 64}, "exclude each other"),
    ],
)
def test_settings_that_no_model_can_use_are_refused(settings: dict, part: str) -> None:
    with pytest.raises(OptionError, match=part):
        CacheSettings(**settings)


def test_a_quantized_cache_is_one_from_the_first_token_on() -> None:
    model = DecoderOnlyModel(tiny.build("llama", head_dim=32), caches=CacheSettings(8, 32))
    caches = cache_maker(model.network, CacheSettings(4, 32))()
    assert {type(cache) for cache in caches} == {QuantizedKVCache}
    assert {(cache.bits, cache.group_size) for cache in caches} == {(4, 32)}


def test_a_window_keeps_no_first_tokens() -> None:
    caches = cache_maker(tiny.build("llama"), CacheSettings(max_size=12))()
    assert {type(cache) for cache in caches} == {RotatingKVCache}
    assert {(cache.max_size, cache.keep) for cache in caches} == {(12, 0)}


@pytest.mark.parametrize("family", ["gemma3", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("settings", [CacheSettings(8, 32), CacheSettings(max_size=16)])
def test_models_with_caches_of_their_own_refuse_both(family: str, settings: CacheSettings) -> None:
    with pytest.raises(OptionError, match="caches of their own"):
        DecoderOnlyModel(tiny.build(family), caches=settings)


def test_groups_that_do_not_fit_a_head_are_refused_before_anything_runs() -> None:
    with pytest.raises(OptionError, match="groups of 64"):
        DecoderOnlyModel(tiny.build("llama"), caches=CacheSettings(8))


def test_a_model_that_cannot_read_packed_keys_says_so_without_blaming_the_groups() -> None:
    widths = dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"), 32)
    network = tiny.build("deepseek_v3", qk_nope_head_dim=32, **widths)
    with pytest.raises(OptionError, match="deepseek_v3 models cannot read"):
        DecoderOnlyModel(network, caches=CacheSettings(8, 32))
