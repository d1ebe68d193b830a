"""Heads compute what torch computes with the same files, whatever their layout and base."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.models.drafters.medusa import MedusaHeads, attach, read
from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "medusa"
KINDS = sorted(path.name for path in FIXTURES.iterdir())


def loaded(kind: str) -> tuple[MedusaHeads, mx.array, np.ndarray]:
    """Heads, the hidden state after the fixture's text, and torch's logits of all heads."""
    files = read(FIXTURES / kind)
    base = load_model(FIXTURES / kind / files.base, dtype="float32").model
    expected = np.load(FIXTURES / kind / "expected.npz")
    context = base.open(expected["prompt"].tolist())
    unseen = mx.array(expected["tokens"][None, context.lengths[0] :].astype(np.int32))
    state = context.advance(unseen, hidden=("final",)).hidden["final"][:, -1:]
    return attach(files, base), state, expected["logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_torchs(kind: str) -> None:
    heads, state, expected = loaded(kind)
    for count in (heads.count, 1):
        logits = np.array(heads.logits(state, count))
        assert logits.shape == (1, count, expected.shape[1])
        np.testing.assert_allclose(logits[0], expected[:count], atol=2e-4, rtol=1e-4)


def test_heads_compute_in_the_type_of_the_hidden_state() -> None:
    files = read(FIXTURES / "llama-shared")
    base = load_model(FIXTURES / "llama-shared" / files.base, dtype="bfloat16").model
    heads = attach(files, base)
    assert heads.weights[0].dtype == mx.bfloat16
    assert heads.logits(mx.ones((1, 1, base.width), dtype=mx.bfloat16), 2).dtype == mx.bfloat16
