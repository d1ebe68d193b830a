from __future__ import annotations

from typing import Any

import pytest

from mlx_specdec.checkpoints import t5_keys as keys
from mlx_specdec.checkpoints.quantization import Quantization, stored_quantization
from mlx_specdec.errors import CheckpointError

from ..support.checkpoints import T5

BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def test_t5_keeps_its_names_and_drops_copies_and_the_unused_bias() -> None:
    dropped = (
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    )
    kept = {name: name for name in ("shared.weight", BIAS)}
    assert keys.names([*kept, *dropped]) == kept


def test_a_copy_stands_in_for_a_missing_shared() -> None:
    copies = ["decoder.embed_tokens.weight", "encoder.embed_tokens.weight"]
    assert keys.names(copies) == {"shared.weight": "encoder.embed_tokens.weight"}
    assert keys.names([*copies, "shared.weight"]) == {"shared.weight": "shared.weight"}


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"model_type": "t5"}, True),
        ({"model_type": "t5", "tie_word_embeddings": True}, True),
        ({"model_type": "t5", "tie_word_embeddings": False}, False),
        ({"model_type": "umt5", "tie_word_embeddings": False}, False),
        ({"model_type": "umt5"}, True),
        ({"model_type": "mt5"}, False),
        ({"model_type": "mt5", "tie_word_embeddings": True}, False),
        ({"model_type": "t5", "tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"model_type": "t5", "tie_word_embeddings": False, "scale_decoder_outputs": True}, True),
    ],
)
def test_scaling_is_a_fact_of_its_own(config: dict[str, Any], scales: bool) -> None:
    assert keys.scales_output(config) is scales


def test_every_layer_of_umt5_has_its_own_bias_and_others_one_per_stack() -> None:
    def biases(kind: str) -> int:
        shapes = keys.t5_shapes({**T5, "model_type": kind}, own_head=False)
        return sum("relative_attention_bias" in name for name in shapes)

    assert (biases("t5"), biases("umt5")) == (2, 3)


@pytest.mark.parametrize("value", [None, 0, -1, "32", 3.0, True])
def test_a_missing_or_odd_size_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match="d_model"):
        keys.t5_shapes({**T5, "d_model": value}, own_head=False)


def test_embedding_and_head_get_at_least_eight_bits_and_positions_are_left_alone() -> None:
    def bits(key: str, shape: tuple[int, ...], asked: int = 4) -> int | None:
        found = keys.quantization_of(T5, key, shape, Quantization(asked, 32))
        return None if found is None else found.bits

    linear = "decoder.block.0.layer.1.EncDecAttention.q.weight"
    assert bits("shared.weight", (64, 32)) == bits("lm_head.weight", (64, 32)) == 8
    assert bits(linear, (32, 32)) == 4 and bits(linear, (32, 32), asked=6) == 6
    assert bits(linear, (32, 48)) is None
    assert bits(BIAS, (32, 32)) is None
    assert bits("encoder.final_layer_norm.weight", (32,)) is None


def test_a_quantization_entry_is_checked() -> None:
    good = {"bits": 4, "group_size": 64, "shared": {"bits": 8, "group_size": 64}}
    assert stored_quantization({"quantization": good}) == good
    assert stored_quantization({}) is None
    bad: list[Any] = [[], {"bits": 7, "group_size": 64}, {"bits": 4}, {"bits": 4, "group_size": 1}]
    for entry in [*bad, {**good, "shared": {"bits": 0, "group_size": 64}}]:
        with pytest.raises(CheckpointError):
            stored_quantization({"quantization": entry})
