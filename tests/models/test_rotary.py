"""A checkpoint computes the same whether config.json has the keys of transformers 4 or of 5."""

import contextlib
import copy
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm import rotary
from mlx_specdec.models.mlx_lm.loader import arguments_of, classes

from ..support import tiny
from ..support.families import config_of

TOKENS = mx.array([[5, 9, 4, 7, 11, 3, 8]])
BASE, OTHER_BASE, SHARE = 500.0, 50_000.0, 0.5
READ_NEW_ALONE = (
    *("gemma4", "gemma4_text", "glm_moe_dsa", "laguna", "mellum", "ministral3", "mistral4"),
    *("qwen3_5", "qwen3_5_moe", "spark2_5"),
)
LOCAL = ("gear", "gemma3", "gemma3_text", "gemma3n", "mimo_v2_flash", "plamo3")
"""Families with a second base for windows: only entries by type of layer describe them."""
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0] * 2,
        "long_factor": [3.0] * 2,
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"factor": 2.0, "alpha": 1000.0},
}
TYPES = ("full_attention", "sliding_attention")
MISTRAL = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
KEYS = (
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"),
    *("rotary_emb_base", "rotary_pct", "original_max_position_embeddings", "swa_rope_theta"),
    *("rope_local_base_freq", "rope_local_theta"),
)


def with_keys(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return a family's config with these rotary settings and no others, in both parts."""
    config = copy.deepcopy(config_of(name))
    for part in (config, config.get("text_config", {})):
        for key in KEYS:
            part.pop(key, None)
        part |= copy.deepcopy(keys)
    return config


def old(name: str, kind: str = "default", base: float = BASE) -> dict[str, Any]:
    scaling = {"type": kind, "rope_type": kind, **SCALED[kind]} if kind in SCALED else None
    length = (scaling or {}).get("original_max_position_embeddings")
    keys = {
        "rope_theta": base,
        "rope_scaling": scaling,
        "partial_rotary_factor": SHARE,
        "rotary_emb_base": int(base),
        "rotary_pct": SHARE,
        **dict.fromkeys(("rope_local_base_freq", "rope_local_theta", "swa_rope_theta"), base),
        **({"partial_rotary_factors": [SHARE] * 2} if name == "step3p5" else {}),
        **({"original_max_position_embeddings": length} if length else {}),
    }
    if name in ("ministral3", "mistral4"):
        # No checkpoint has these settings elsewhere.
        keys["rope_scaling"] = {"rope_type": "default", **MISTRAL}
    return with_keys(name, keys)


def new(name: str, kind: str = "default", *, by_type: bool = False) -> dict[str, Any]:
    flat: dict[str, Any] = {"rope_type": kind, "rope_theta": BASE, "partial_rotary_factor": SHARE}
    flat |= SCALED.get(kind, {})
    if name in ("ministral3", "mistral4"):
        flat |= MISTRAL
    both = dict.fromkeys(TYPES, flat)
    return with_keys(name, {"rope_parameters": both if by_type else flat})


def logits(network: Any) -> mx.array:
    scores: mx.array = network(TOKENS, cache=make_prompt_cache(network))
    return scores


def read(config: dict[str, Any], like: Any) -> Any:
    """Return the network that we read from a config, with the weights of another."""
    kind, arguments = classes(config)
    # Some families print remarks.
    with contextlib.redirect_stdout(sys.stderr):
        network = kind(arguments_of(config, arguments))
    network.update(like.parameters())
    network.eval()
    rotary.check(network, config)
    return network


SCALING_FAMILIES = (
    *(("linear", name) for name in ("deepseek", "gemma3_text", "internlm3", "nemotron", "qwen2")),
    *(("llama3", name) for name in ("llama", "exaone4", "mistral3")),
    *(("yarn", name) for name in ("deepseek_v3", "gpt_oss", "olmo3", "qwen3_5", "kimi_vl")),
    *(("longrope", "phi3"), ("dynamic", "hunyuan_v1_dense")),
)


@pytest.mark.parametrize(("kind", "name"), SCALING_FAMILIES)
def test_positions_are_scaled_alike_from_both_spellings(kind: str, name: str) -> None:
    by_type = name in (*LOCAL, "olmo3")
    earlier, later = old(name, kind), new(name, kind, by_type=by_type)
    if by_type:
        later["rope_parameters"]["sliding_attention"] = {"rope_type": "default", "rope_theta": BASE}
    network = tiny.from_config(later if name in READ_NEW_ALONE else earlier)
    expected = logits(network)
    plain = logits(read(old(name), network))
    for config in (earlier, later):
        assert mx.allclose(logits(read(config, network)), expected, atol=1e-4)
    assert not mx.allclose(plain, expected, atol=1e-4)


SECOND_BASES = {
    "gemma3": "rope_local_base_freq",
    "gemma3n": "rope_local_base_freq",
    "gear": "rope_local_base_freq",
    "plamo3": "rope_local_theta",
    "mimo_v2_flash": "swa_rope_theta",
    "deepseek_v41": "compress_rope_theta",
}


@pytest.mark.parametrize("name", SECOND_BASES)
def test_layers_with_windows_keep_a_base_of_their_own(name: str) -> None:
    kinds = ("main", "compress") if name == "deepseek_v41" else TYPES
    bases = ({"rope_theta": BASE}, {"rope_theta": OTHER_BASE})
    entries = [{"rope_type": "default", "partial_rotary_factor": SHARE, **base} for base in bases]
    later = with_keys(name, {"rope_parameters": dict(zip(kinds, entries, strict=True))})
    earlier = old(name)
    for part in (earlier, earlier.get("text_config", {})):
        part[SECOND_BASES[name]] = OTHER_BASE
    network = tiny.from_config(earlier)
    assert mx.allclose(logits(read(later, network)), logits(network), atol=1e-4)


def test_bases_that_a_family_cannot_tell_apart_are_refused() -> None:
    entries = {TYPES[0]: {"rope_theta": 1e6}, TYPES[1]: {"rope_theta": 1e4}}
    config = with_keys("llama", {"rope_parameters": entries})
    with pytest.raises(CheckpointError, match="types of layers different rotary positions"):
        read(config, tiny.build("llama"))


def write(config: dict[str, Any], directory: Path, like: Any) -> Path:
    directory.mkdir()
    weights = dict(tree_flatten(like.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


IGNORE = ("cohere", "gemma2", "gemma3n", "glm4_moe", "lfm2", "mixtral", "stablelm")
"""Families that take no notice of rope_scaling."""


@pytest.mark.parametrize("name", IGNORE)
def test_a_scaling_that_a_family_ignores_is_refused(name: str, tmp_path: Path) -> None:
    network = tiny.from_config(old(name))
    for number, config in enumerate((old(name, "yarn"), new(name, "yarn", by_type=name in LOCAL))):
        directory = write(config, tmp_path / str(number), network)
        with pytest.raises(CheckpointError, match="scales positions by the type 'yarn'"):
            load_model(directory)
