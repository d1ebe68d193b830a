"""Heads that mlx-lm would divide stay whole on rank 0, which alone is asked for logits."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.errors import OptionError
from mlx_specdec.models.mlx_lm import loading as decoder_loading
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import thread_ranks, tiny

TOKENS = mx.array([[5, 9, 12]])


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_asked_on_rank_0_alone_is_kept_there_alone(
    monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    # One of two ranks, which has its own part of every sum.
    monkeypatch.setattr(mx.distributed, "all_sum", lambda part, group=None: part)
    networks = [tiny.build("llama", tie_word_embeddings=tied) for _ in range(2)]
    heads = [dict(tree_flatten(each.parameters())).get("lm_head.weight") for each in networks]
    for network, rank in zip(networks, thread_ranks.ranks(2), strict=True):
        decoder_loading.divide(network, rank, pipeline=False)  # type: ignore[arg-type]
    first, second = (DecoderOnlyModel(network) for network in networks)
    assert first.nbytes - second.nbytes == (0 if heads[0] is None else heads[0].nbytes)
    assert second.vocabulary == first.vocabulary == tiny.VOCABULARY
    if heads[0] is not None:
        assert mx.array_equal(networks[0].lm_head.weight, heads[0])
        assert (second.open([5]).advance(TOKENS).logits == 1).all().item()


def test_keys_and_values_that_all_heads_share_need_not_divide() -> None:
    latent = {"num_attention_heads": 4, "num_key_value_heads": 1, "kv_lora_rank": 16}
    decoder_loading.check_shares({"model_type": "deepseek_v3", **latent}, 2, pipeline=False)
    with pytest.raises(OptionError, match="2 ranks cannot have equal parts of 3 attention heads"):
        uneven = latent | {"num_attention_heads": 3}
        decoder_loading.check_shares({"model_type": "deepseek_v3", **uneven}, 2, pipeline=False)
