"""Self-drafting: the target's own layers at fewer bits, sharing what is not packed."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import seed_oss

from mlx_specdec.errors import OptionError
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.self_draft import quantized_twin, self_draft
from mlx_specdec.models.t5.network import T5, T5Config

from ..support import tiny

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5"
TOKENS = mx.array([[3, 9, 4, 33, 7]])


def arrays(network: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(network.parameters()))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "mamba2"])
def test_fewer_bits_are_further_from_the_target(name: str) -> None:
    network = tiny.build(name)
    expected = network(TOKENS)
    errors = []
    for bits in (8, 4, 2):
        twin = quantized_twin(network, bits, 32)
        errors.append(mx.abs(twin(TOKENS) - expected).mean().item())
    assert 0 < errors[0] < errors[1] < errors[2]
    assert mx.array_equal(network(TOKENS), expected)


def test_of_a_t5_only_the_decoder_is_packed() -> None:
    config = json.loads((FIXTURES / "own-head-scaled" / "config.json").read_text())
    shape = T5Config.from_dict(
        {**config, "d_model": 32, "d_ff": 64, "vocab_size": 50}, own_head=True
    )
    network = T5(shape)
    twin = quantized_twin(network, 4, 32)
    packed = {path for path, module in twin.named_modules() if hasattr(module, "bits")}
    assert packed and not any(path.startswith(("encoder", "shared")) for path in packed)
    assert "lm_head" in packed


def test_packed_targets_are_packed_further_or_refused() -> None:
    network = quantized_twin(tiny.build("llama"), 8, 32)
    twin = quantized_twin(network, 4, 32)
    assert twin.lm_head.bits == 4 and network.lm_head.bits == 8
    before, after = network(TOKENS), twin(TOKENS)
    assert 0 < mx.abs(before - after).mean().item() < 1
    with pytest.raises(OptionError, match="fewer draft-bits"):
        quantized_twin(network, 8, 32)


def test_a_tied_head_that_reads_past_its_layer_is_one_sentence() -> None:
    config = {**tiny.CONFIGS["llama"], "model_type": "seed_oss", "tie_word_embeddings": True}
    config |= {"attention_bias": False, "attention_out_bias": False}
    network = seed_oss.Model(seed_oss.ModelArgs.from_dict(config))
    with pytest.raises(OptionError, match="own layers cannot draft") as caught:
        self_draft(DecoderOnlyModel(network), 4, 32)
    assert "\n" not in str(caught.value)
