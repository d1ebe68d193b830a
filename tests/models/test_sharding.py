"""A model that ranks share gives what the whole one gives, and what cannot be shared is refused."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints.files import read_config
from mlx_specdec.errors import OptionError
from mlx_specdec.models.base import LoadSettings
from mlx_specdec.models.encoder_decoder.context import EncoderDecoderModel
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm import family as decoder_loading
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.models.t5 import family as t5_family

from ..support import tiny
from ..support.models import SOURCE, TOKENS
from ..support.pairs import BART, FIXTURES
from ..support.thread_ranks import Rank, adding_up, on_every, ranks

KINDS = sorted(path.name for path in FIXTURES.iterdir())
FLOAT = NumberFormat("float32")


def close(found: Any, expected: Any) -> bool:
    return bool(np.abs(np.array(found) - np.array(expected)).max() <= 1e-5 * np.abs(expected).max())


def logits(model: EncoderDecoderModel) -> np.ndarray:
    """Of two sources of different lengths, in a pass over many rows and one over a single row."""
    context = model.open_batch([SOURCE, [9, 8, 7, 6, 5, 1]])
    rows = [context.advance(mx.repeat(TOKENS, 2, axis=0), proposed=4).logits]
    context.rewind((4, 3))
    rows.append(context.advance(mx.array([[9], [4]])).logits)
    return np.array(mx.concatenate(rows, axis=1))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_that_load_a_model_compute_what_one_does(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    directory, group = FIXTURES / kind, ranks(2)
    config = read_config(directory)

    def load(rank: Rank) -> tuple[np.ndarray, int]:
        model = t5_family.load(directory, config, LoadSettings(FLOAT, group=rank))[0]
        return logits(model), model.nbytes

    alone = load_model(directory, dtype="float32").model
    with adding_up(monkeypatch):
        shared = on_every(group, load)
    assert all(close(part, logits(alone)) for part, _ in shared)
    assert np.array_equal(shared[0][0], shared[1][0])
    assert all(nbytes < 0.75 * alone.nbytes for _, nbytes in shared)
    layers = config["num_layers"], config.get("num_decoder_layers") or config["num_layers"]
    # The encoder runs once, over both sources, and the decoder twice.
    assert [rank.sums for rank in group] == [2 * layers[0] + 2 * 3 * layers[1]] * 2


@pytest.mark.parametrize(
    ("shape", "count", "message"),
    [
        (
            {"num_heads": 6, "d_ff": 96},
            4,
            "6 attention heads: take 2 or 3 or 6 ranks",
        ),
        ({"num_heads": 5, "d_ff": 81}, 3, "take one machine$"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_weights_are_looked_for(
    tmp_path: Path, shape: dict[str, int], count: int, message: str
) -> None:
    config = {**json.loads((FIXTURES / "mt5" / "config.json").read_text()), **shape}
    with pytest.raises(OptionError, match=message):
        t5_family.load(tmp_path, config, LoadSettings(FLOAT, group=ranks(count)[0]))


def test_what_ranks_cannot_share_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="cannot divide the layers of a model of type phi3"):
        decoder_loading.check_shares(tiny.CONFIGS["phi3"], 2)
    for directory in (*BART.iterdir(), BART.parent / "t5gemma2" / "grouped"):
        kind = read_config(directory)["model_type"]
        with pytest.raises(OptionError, match=f"^ranks cannot share a model of type {kind}: take"):
            load_model(directory, group=ranks(2)[0])
        with pytest.raises(OptionError, match="which cannot have distributed pipeline"):
            load_model(directory, group=ranks(2)[0], pipeline=True)
    with pytest.raises(OptionError, match="ranks cannot share an adapter"):
        load_model(FIXTURES / "mt5", adapter=Path("nowhere"), group=ranks(2)[0])


# Heads that mlx-lm would divide stay whole on rank 0, which alone computes logits.


HEAD_TOKENS = mx.array([[5, 9, 12]])


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_requested_on_rank_0_alone_is_kept_there_alone(
    monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    # One of two ranks, which has its own part of every sum.
    monkeypatch.setattr(mx.distributed, "all_sum", lambda part, group=None: part)
    networks = [tiny.build("llama", tie_word_embeddings=tied) for _ in range(2)]
    heads = [dict(tree_flatten(network.parameters())).get("lm_head.weight") for network in networks]
    for network, rank in zip(networks, ranks(2), strict=True):
        decoder_loading.divide(network, rank, pipeline=False)  # type: ignore[arg-type]
    first, second = (DecoderOnlyModel(network) for network in networks)
    assert first.nbytes - second.nbytes == (0 if heads[0] is None else heads[0].nbytes)
    assert second.vocabulary == first.vocabulary == tiny.VOCABULARY
    if heads[0] is not None:
        assert mx.array_equal(networks[0].lm_head.weight, heads[0])
        assert (second.open_batch([[5]]).advance(HEAD_TOKENS).logits == 1).all().item()
