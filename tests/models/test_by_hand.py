"""Drafters' arithmetic against NumPy's in float64, with and without an encoder."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ..support.lender import LIMIT, Lender, Run, network_of
from ..support.speculators import VOCABULARY, WIDTH, dflash, eagle
from . import dflash_by_hand, eagle_by_hand

PLAIN = {"layer_types": ["full_attention"] * 2, "rope_theta": 10000.0, "block_size": 4}
MIXED = {**PLAIN, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle, fc.bias": (eagle, {"rope_theta": 10000.0, "extra": {"fc.bias": (WIDTH,)}}),
    "eagle, positions": (eagle, {"rope_theta": 500.0, "bias": True}),
    "dflash, encoder": (dflash, {**PLAIN, "encoder": WIDTH}),
    "dflash, window": (dflash, MIXED),
}
COUNT, LENGTHS = 3, (2, 7, 8, 12, 13, 24)


def normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def doubled(array: mx.array) -> np.ndarray:
    return np.array(array, dtype=np.float64)


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_made_by_hand_round_after_round(name: str, tmp_path: Path) -> None:
    make, settings = CASES[name]
    directory = make(tmp_path, **settings)
    config = json.loads((directory / "config.json").read_text())
    stored = mx.load(str(directory / "model.safetensors"))
    tensors = {key: doubled(array) for key, array in stored.items()}
    embedding, head = normal((VOCABULARY, WIDTH), 1), normal((VOCABULARY, WIDTH), 4) * WIDTH**-0.5
    network = network_of(directory, Lender(embedding, head))
    hidden = normal((23, len(network.hidden) * WIDTH), 2)
    encoded = normal((9, WIDTH), 3) if "encoder" in settings else None
    tokens = [(5 * place + 7) % VOCABULARY for place in range(24)]
    run = Run(network, tokens, hidden, encoded)
    of_source = None if encoded is None else doubled(encoded)
    for length in LENGTHS:
        drafted, logits = run.draft(length, COUNT)
        before, states, table = tokens[:length], doubled(hidden)[: length - 1], doubled(embedding)
        if make is eagle:
            target = table, doubled(head)
            expected, rows = eagle_by_hand.drafted(tensors, config, target, (before, states), COUNT)
        else:
            slots = table[[before[-1], *[config["dflash_config"]["mask_token_id"]] * COUNT]]
            made = dflash_by_hand.block(tensors, config, states, slots, of_source)[1:]
            rows = made @ doubled(head).T
            expected = rows.argmax(axis=-1).tolist()
        assert drafted == expected
        assert np.max(np.abs(np.array(logits) - rows)) <= LIMIT
