"""Trainable copies compute the same logits as their models, and have gradients."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_specdec.models.base import Trainable
from mlx_specdec.models.loading import load_model, trainable
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.types import Model

from ..support import tiny
from ..support.pairs import FIXTURES, read

PROMPTS = [[3, 4, 5], [6] * 12, [7, 8]]
TEXTS = [list(range(9, 21)), [21, 22], [5] * 7]


def of_context(model: Model, prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    context = read(model, prompt)
    fed = [model.prefix(prompt)[-1], *text[:-1]]
    return np.array(context.advance(mx.array([fed], dtype=mx.int32)).logits[0])


def check_same(model: Model, draft: Trainable) -> None:
    found = np.array(draft.logits(*draft.inputs(PROMPTS, TEXTS)))
    pairs = zip(PROMPTS, TEXTS, strict=True)
    expected = np.concatenate([of_context(model, prompt, text) for prompt, text in pairs])
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gpt_oss", "mamba2", "qwen3_next", "falcon_h1"]
)
def test_padded_texts_get_the_logits_that_each_gets_alone(name: str) -> None:
    model = DecoderOnlyModel(tiny.build(name))
    check_same(model, trainable(model))


@pytest.mark.parametrize(
    "name", ["bart/bart", "bart/marian-two-vocabularies", "t5/mt5", "t5/umt5-tied", "t5gemma2/old"]
)
def test_sources_and_texts_of_encoder_decoders_may_be_padded(name: str) -> None:
    model = load_model(FIXTURES.parent / name, dtype="float32").model
    check_same(model, trainable(model))


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_gradients_are_those_of_finite_differences(family: str) -> None:
    if family == "llama":
        draft = trainable(DecoderOnlyModel(tiny.build("llama", num_hidden_layers=1)))
    else:
        draft = trainable(load_model(FIXTURES / "gated-silu", dtype="float32").model)
    inputs = draft.inputs(PROMPTS, TEXTS)
    marks = mx.random.normal(draft.logits(*inputs).shape, key=mx.random.key(0))

    def value() -> mx.array:
        return (nn.log_softmax(draft.logits(*inputs)) * marks).mean()

    _, gradients = nn.value_and_grad(draft.network, value)()
    start = dict(tree_flatten(draft.network.parameters()))
    keys = mx.random.split(mx.random.key(1), len(start))
    for key, (name, gradient) in zip(keys, tree_flatten(gradients), strict=True):
        direction = mx.random.normal(gradient.shape, key=key)
        step = 2e-3 * mx.abs(start[name]).mean()
        sides = []
        for sign in (1, -1):
            moved = start[name] + sign * step * direction
            draft.network.update(tree_unflatten([(name, moved)]))
            sides.append(value().item())
        draft.network.update(tree_unflatten([(name, start[name])]))
        expected = (sides[0] - sides[1]) / (2 * step.item())
        found = (gradient * direction).sum().item()
        assert found == pytest.approx(expected, rel=0.05, abs=2e-3), name
