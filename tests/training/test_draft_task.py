"""What a draft is asked: the rows of the right texts, each text once an epoch."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.models.loading import trainable
from mlx_specdec.options import Options
from mlx_specdec.training.collect import Rows, Sample, collect
from mlx_specdec.training.config import DataConfig, DistillConfig
from mlx_specdec.training.draft import DraftTask

from ..support.models import make_llama, make_t5

SAMPLES = [Sample(" ".join(["some words and more"] * count)) for count in (3, 1, 2, 1, 4, 2, 1)]
COLLECTING = DataConfig(length=60, texts_at_once=2, temperatures=(0.0,))


@pytest.fixture(scope="module", params=[make_llama, make_t5])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return loading.load(request.param(tmp_path_factory.mktemp("model")))


Learned = tuple[Rows, list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def learned(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Rows and their prompts."""
    rows = Rows(tmp_path_factory.mktemp("rows"), pair.target.width, pair.target.state_dtype)
    return rows, collect(pair, SAMPLES, COLLECTING, rows, lambda done, total: None)


def task_of(pair: Pair, learned: Learned, **config: object) -> DraftTask:
    draft = trainable(pair.target)
    return DraftTask(draft, pair.target, *learned, pair.vocabulary, DistillConfig(**config))


def test_prompts_stand_in_the_order_of_their_texts(pair: Pair, learned: Learned) -> None:
    rows, prompts = learned
    texts = rows.texts()
    assert len(prompts) == len(texts)
    for prompt, text in zip(prompts, texts, strict=True):
        if text:
            again = generate(pair, prompt, Options(max_tokens=8, regular=True))
            assert list(again.tokens) == text[:8]


def test_a_target_is_the_perfect_draft_of_itself(pair: Pair, learned: Learned) -> None:
    closeness = task_of(pair, learned, batch=2).evaluate()
    assert closeness.acceptance == pytest.approx(1, abs=1e-3)
    assert closeness.agreement == 1
    assert closeness.loss == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_text_comes_once_an_epoch(size: int, pair: Pair, learned: Learned) -> None:
    task = task_of(pair, learned, batch=size)
    counts = [[task.batch(e, at)[0].shape[0] for at in range(task.steps)] for e in (0, 1)]
    assert sum(counts[0]) == sum(counts[1]) == task.count(task.train)
    assert sum(counts[0]) + task.count(task.held_out) == int(learned[0].lengths.sum())


def test_a_batch_is_the_same_whenever_it_is_asked_for(pair: Pair, learned: Learned) -> None:
    first, second = task_of(pair, learned, batch=2), task_of(pair, learned, batch=2)
    first.batch(0, 0)
    for found, right in zip(first.batch(1, 1), second.batch(1, 1), strict=True):
        assert np.array_equal(np.array(found), np.array(right))


def test_figures_are_averages_over_all_tokens(pair: Pair, learned: Learned) -> None:
    task = task_of(pair, learned, batch=2, divergence="reverse")
    target = np.random.default_rng(6).normal(0, 2, (5, pair.vocabulary))
    draft = np.random.default_rng(7).normal(0, 2, (5, pair.vocabulary))
    draft[0] = target[0]
    given = mx.array(target), mx.array(draft)
    task._draft = SimpleNamespace(logits=lambda logits: logits)
    total = task.sums(given[0][:2], given[1][:2]) + task.sums(given[0][2:], given[1][2:])
    closeness = task.figures(total)
    p, q = (
        np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) for logits in (target, draft)
    )
    accepted = np.minimum(p, q).sum(axis=1).mean()
    agreeing = (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert closeness.loss == pytest.approx((q * np.log(q / p)).sum(axis=1).mean(), abs=1e-4)
    assert closeness.acceptance == pytest.approx(accepted, abs=1e-5)
    assert closeness.score == pytest.approx(1 - accepted, abs=1e-5)
    assert closeness.agreement == pytest.approx(agreeing)
    assert agreeing > 0
