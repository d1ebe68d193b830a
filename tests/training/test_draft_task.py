"""What a draft is asked: the rows of the right texts, each text once an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_specdec import assemble
from mlx_specdec.assemble import Pair, generate
from mlx_specdec.models.trainable import trainable
from mlx_specdec.options import Options
from mlx_specdec.training.collect import collect, prompts
from mlx_specdec.training.data import Sample
from mlx_specdec.training.draft_task import DraftTask
from mlx_specdec.training.rows import Rows
from mlx_specdec.training.settings import Collecting, Distilling

from ..cli.conftest import make_llama, make_t5

SAMPLES = [Sample(" ".join(["some words and more"] * count)) for count in (3, 1, 2, 1, 4, 2, 1)]
COLLECTING = Collecting(length=60, texts_at_once=2)


@pytest.fixture(scope="module", params=[make_llama, make_t5])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return assemble.load(request.param(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def rows(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    found = Rows(tmp_path_factory.mktemp("rows"), pair.target.width, pair.target.state_dtype)
    collect(pair, SAMPLES, COLLECTING, found, lambda done, total: None)
    return found


def task_of(pair: Pair, rows: Rows, **settings: object) -> DraftTask:
    before = prompts(pair, SAMPLES, COLLECTING)
    draft = trainable(pair.target)
    return DraftTask(draft, pair.target, rows, before, pair.vocabulary, Distilling(**settings))


def test_prompts_stand_in_the_order_of_their_texts(pair: Pair, rows: Rows) -> None:
    before, texts = prompts(pair, SAMPLES, COLLECTING), rows.texts()
    assert len(before) == len(texts)
    assert before != prompts(pair, SAMPLES, Collecting(length=60, self_distill=False))
    for prompt, text in zip(before, texts, strict=True):
        if text:
            again = generate(pair, prompt, Options(max_tokens=len(text), regular=True))
            assert list(again.tokens) == text


def test_a_target_is_the_perfect_draft_of_itself(pair: Pair, rows: Rows) -> None:
    found = task_of(pair, rows, batch=2).judge()
    assert found.acceptance == pytest.approx(1, abs=1e-3)
    assert found.agreement == 1
    assert found.loss == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_text_comes_once_an_epoch(size: int, pair: Pair, rows: Rows) -> None:
    task = task_of(pair, rows, batch=size)
    counts = [[task.batch(e, at)[0].shape[0] for at in range(task.steps)] for e in (0, 1)]
    assert sum(counts[0]) == sum(counts[1]) == task.rows
    assert task.rows + task.held_out == int(rows.lengths.sum())


def test_a_batch_is_the_same_whenever_it_is_asked_for(pair: Pair, rows: Rows) -> None:
    first, second = task_of(pair, rows, batch=2), task_of(pair, rows, batch=2)
    first.batch(0, 0)
    for found, right in zip(first.batch(1, 1), second.batch(1, 1), strict=True):
        assert np.array_equal(np.array(found), np.array(right))
