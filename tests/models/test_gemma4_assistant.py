"""Gemma 4's assistants against transformers', on a target of mlx-lm's that reads the same weights.

tests/fixtures/make_gemma4.py wrote the fixtures: each round is computed from the beginning there.
"""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.interfaces import FINAL
from mlx_specdec.models.drafters.kinds import attach, read
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.proposers.hidden_state import HiddenStateDrafter
from mlx_specdec.sampling.noise import SilentNoise
from mlx_specdec.sampling.settings import Sampling

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gemma4_assistant"
LIMIT = 1e-4


@pytest.mark.parametrize("name", ["dense", "ordered"])
def test_drafts_are_those_of_transformers_round_after_round(name: str) -> None:
    reference = mx.load(str(FIXTURES / name / "reference.st"), format="safetensors")
    target = load_model(FIXTURES / name / "target", dtype="float32").model
    files = read(FIXTURES / name / "assistant")
    assert files is not None
    network = attach(files, target, NumberFormat("float32"))
    # Layers 4 and 5 borrow from 2 and 3.
    lent = {f"{part}.{layer}" for part in ("keys", "values") for layer in (2, 3)}
    assert {*network.taps} == {FINAL, *lent}
    tokens: list[int] = reference["tokens"].tolist()
    proposer = HiddenStateDrafter(network, Sampling(temperature=1.0), target.vocabulary)
    proposer.begin([tokens])
    context = target.open(tokens)
    start = 0
    for length, logits, expected in zip(
        reference["lengths"].tolist(), reference["logits"], reference["drafted"], strict=True
    ):
        shown = tokens[start : length - 1]
        if shown:
            fed = mx.array([shown], dtype=mx.int32)
            proposer.observe([shown], [context.advance(fed, taps=proposer.taps)])
        start = length - 1
        proposal = proposer.propose([tokens[:length]], logits.shape[0], SilentNoise())
        assert proposal.tokens.tolist() == [expected.tolist()]
        assert proposal.rows is not None
        rows, finite = proposal.rows[0], mx.isfinite(proposal.rows[0])
        assert mx.max(mx.where(finite, mx.abs(rows - logits), 0)).item() <= LIMIT
        # transformers gives the least logit to tokens outside of the likeliest clusters.
        assert mx.sum(finite).item() == pytest.approx(rows.size * (1 if name == "dense" else 0.3))
        assert mx.all(finite | (logits == mx.min(logits, axis=-1, keepdims=True)))
