"""Each mend of mlx-lm's families is needed: without it, a case of the contract comes out wrong. If
a test here fails after an update of mlx-lm, mlx-lm computes the same by itself, and the mend can
go."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import load
from mlx_specdec.models.mlx_lm import mends
from mlx_specdec.models.mlx_lm.family import network_of

from ..contract.configurations import CASES, compare, prompts_of, written

pytestmark = pytest.mark.slow
NEEDED_BY: dict[Callable[..., Any], tuple[str, ...]] = {
    mends.windows: ("gemma2-window", "mistral-window", "phi3-window", "qwen2-window"),
    mends.yarn: ("llama-yarn-attention", "gpt_oss-yarn-exact"),
    mends.longrope: ("phi3-longrope", "llama-longrope"),
    mends.partial_rotary: ("glm",),
    mends.halves: ("deepseek_v3-halves",),
    mends.scaled_rotary: ("qwen3_moe-yarn-exact",),
    mends.gelu: ("gemma-tanh", "starcoder2-tanh", "gpt_neox"),
    mends.embedding_scale: ("gemma3_text", "recurrent_gemma"),
    mends.tied_scale: ("minicpm3",),
    mends.soft_cap: ("gemma3_text-cap",),
    mends.without_caps: ("gemma2-no-caps",),
    mends.time_steps: ("nemotron_h-steps",),
    mends.grouped_norm: ("falcon_h1-norm", "granitemoehybrid-groups"),
    mends.routing_bias: ("ernie4_5_moe",),
    mends.softmax_over_all: ("jamba",),
}
LEAST = 1e-5
"""Least difference of a log-probability that rounding does not explain."""


def wrong(name: str, directory: Path) -> bool:
    """Return whether a case is refused, or computed with another result than transformers'."""
    case = json.loads((CASES / f"{name}.json").read_text())
    try:
        pair = load(written(case, directory))
        return any(compare(pair, prompt, out) > LEAST for prompt, out in prompts_of(case))
    except Exception:  # other tokens, or an error of mlx-lm
        return True


@pytest.mark.parametrize(
    ("mend", "name"), [(mend, name) for mend, names in NEEDED_BY.items() for name in names]
)
def test_a_mend_is_needed(
    mend: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = {
        kind: tuple(one for one in applied if one is not mend)
        for kind, applied in mends.MENDS.items()
    }
    monkeypatch.setattr(mends, "MENDS", fewer)
    monkeypatch.setattr(
        mends, "OF_ALL_TYPES", tuple(one for one in mends.OF_ALL_TYPES if one is not mend)
    )
    assert wrong(name, tmp_path)


def test_every_mend_is_tested() -> None:
    applied = {one for every in mends.MENDS.values() for one in every}
    assert applied | {*mends.OF_ALL_TYPES} == NEEDED_BY.keys()


@pytest.mark.parametrize("name", ["falcon_h1-scales", "gemma3n_text"])
def test_a_change_of_tensors_is_needed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mends, "TENSOR_MENDS", {})
    assert wrong(name, tmp_path)


def test_a_network_for_training_is_mended_too() -> None:
    config = json.loads((CASES / "glm.json").read_text())["config"]
    network = network_of(config, "glm")
    assert network.layers[0].self_attn.rope.dims == config["head_dim"] // 2
