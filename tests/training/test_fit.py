"""HeadsConfig: heads learn, stop in time, and lose nothing by an interruption."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.models.base import Base
from mlx_specdec.models.drafters.medusa import MedusaHeads
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.training import fit as fitting
from mlx_specdec.training.collect import Rows
from mlx_specdec.training.config import HeadsConfig
from mlx_specdec.training.fit import Fit
from mlx_specdec.training.medusa import DECAY, HeadTask, initial_heads

from ..support import tiny
from ..support.pairs import FIXTURES

SIZE = tiny.VOCABULARY


@pytest.fixture(scope="module")
def base() -> Base:
    return DecoderOnlyModel(tiny.build("llama"))


def counting(directory: Path, width: int, samples: int = 12) -> Rows:
    """Texts that count modulo 8, and states that tell the next number."""
    directory.mkdir(exist_ok=True)
    rows = Rows(directory, width, mx.float32)
    marks = mx.random.normal((8, width), key=mx.random.key(1))
    for sample in range(samples):
        tokens = [(sample + place) % 8 for place in range(10)]
        rows.append([8 + token for token in tokens], marks[mx.array(tokens)])
    return rows


def fit_of(heads: MedusaHeads, rows: Rows, settings: HeadsConfig, file: Path) -> Fit:
    return Fit(HeadTask(heads, rows, settings), settings, file)


def ignore(*said: object) -> None:
    return None


def weights(heads: MedusaHeads) -> list[np.ndarray]:
    return [np.array(array) for _, array in sorted(heads.tensors().items())]


@pytest.mark.parametrize("own_output", [True, False])
def test_fresh_heads_say_what_the_base_says(own_output: bool, base: Base) -> None:
    scaled = load_model(FIXTURES / "tied-scaled-relu", dtype="float32").model
    for model in (base, scaled):
        heads = initial_heads(model, 2, 2, own_output=own_output)
        state = mx.random.normal((1, 1, model.width), key=mx.random.key(2))
        logits = heads.logits(state, 2)
        expected = model.head(state)
        assert mx.allclose(logits, mx.repeat(expected, 2, axis=1), atol=1e-5)


@pytest.mark.parametrize("own_output", [True, False])
def test_heads_learn_what_can_be_learned(own_output: bool, base: Base, tmp_path: Path) -> None:
    heads = initial_heads(base, 2, 1, own_output=own_output)
    settings = HeadsConfig(heads=2, epochs=15, batch=16, learning_rate=0.02, own_output=own_output)
    accuracies, losses = [], []
    rows = counting(tmp_path, base.width)
    fit = fit_of(heads, rows, settings, tmp_path / "c.safetensors")
    outcome = fit.run(
        lambda done, total, value: losses.append(value),
        lambda epoch, accuracy: accuracies.append(accuracy),
    )
    assert losses[-1] < 0.1 * losses[0]
    assert outcome.figures.top1 == outcome.figures.top5 == (1.0, 1.0)
    assert outcome.figures.loss == pytest.approx(min(one.loss for one in accuracies), abs=1e-5)
    task = HeadTask(heads, rows, settings)
    assert (len(task.train), len(task.held_out)) == (110, 10)


def test_the_base_stays_as_it_is(base: Base, tmp_path: Path) -> None:
    state = mx.random.normal((1, 3, base.width), key=mx.random.key(3))
    before = np.array(base.head(state))
    heads = initial_heads(base, 1, 1, own_output=False)
    settings = HeadsConfig(heads=1, epochs=2, batch=32, learning_rate=0.02)
    fit_of(heads, counting(tmp_path, base.width), settings, tmp_path / "c").run(ignore, ignore)
    assert np.array_equal(np.array(base.head(state)), before)


@pytest.mark.parametrize("at", [1, 4, 8, 13])
def test_an_interrupted_training_ends_with_the_same_heads(
    at: int, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "STEPS_BETWEEN", 3)
    rows = counting(tmp_path, base.width)
    settings = HeadsConfig(heads=2, epochs=3, batch=24, learning_rate=0.01)

    def made(file: str) -> tuple[MedusaHeads, Fit]:
        heads = initial_heads(base, 2, 1, own_output=False)
        return heads, fit_of(heads, rows, settings, tmp_path / file)

    expected, whole = made("whole.safetensors")
    outcome = whole.run(ignore, ignore)

    def interrupt(done: int, total: int, value: float) -> None:
        if done == at:
            raise KeyboardInterrupt

    _, broken = made("broken.safetensors")
    with pytest.raises(KeyboardInterrupt):
        broken.run(interrupt, ignore)
    steps: list[int] = []
    heads, again = made("broken.safetensors")
    assert again.run(lambda done, total, value: steps.append(done), ignore) == outcome
    assert at - 3 < steps[0] <= at + 1, "only steps since the last checkpoint are made again"
    for found, right in zip(weights(heads), weights(expected), strict=True):
        assert np.array_equal(found, right), "bit for bit"


def test_it_stops_when_held_out_texts_no_longer_profit(base: Base, tmp_path: Path) -> None:
    rows = Rows(tmp_path, base.width, mx.float32)
    draw = np.random.default_rng(0)
    for key in mx.random.split(mx.random.key(0), 8):
        rows.append(draw.integers(0, SIZE, 12), mx.random.normal((12, base.width), key=key))
    settings = HeadsConfig(heads=1, epochs=50, batch=32, learning_rate=0.05, patience=2)
    accuracies = []
    heads = initial_heads(base, 1, 1, own_output=True)
    outcome = fit_of(heads, rows, settings, tmp_path / "c.safetensors").run(
        ignore, lambda epoch, accuracy: accuracies.append(accuracy.loss)
    )
    best = accuracies.index(min(accuracies))
    assert outcome.epochs == len(accuracies) == best + 1 + 2
    assert outcome.figures.loss == pytest.approx(min(accuracies), abs=1e-4)


def test_losses_and_shares_leave_out_what_was_not_asked(base: Base, tmp_path: Path) -> None:
    heads = initial_heads(base, 2, 1, own_output=False)
    states = mx.random.normal((3, base.width), key=mx.random.key(4))
    logits = np.array(base.head(states[None])[0], np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-logits, axis=1)
    # Head 0: the likeliest, the third, the tenth. Head 1: the second, and twice nothing.
    asked = [[order[0, 0], order[0, 1]], [order[1, 2], -1], [order[2, 9], -1]]
    targets = mx.array(np.array(asked, np.int32))
    first = -(log_p[0, order[0, 0]] + log_p[1, order[1, 2]] + log_p[2, order[2, 9]]) / 3
    second = -log_p[0, order[0, 1]]
    expected = (first + DECAY * second) / (1 + DECAY)
    task = HeadTask(heads, counting(tmp_path, base.width), HeadsConfig(heads=2))
    sums = task.sums(states[:1], targets[:1]) + task.sums(states[1:], targets[1:])
    accuracy = task.figures(sums)
    assert accuracy.loss == pytest.approx(expected, abs=1e-4)
    assert float(task.loss(states, targets).item()) == pytest.approx(expected, abs=1e-4)
    assert accuracy.top1 == pytest.approx((1 / 3, 0.0), abs=1e-4)
    assert accuracy.top5 == pytest.approx((2 / 3, 1.0), abs=1e-4)


def test_a_damaged_checkpoint_is_named(base: Base, tmp_path: Path) -> None:
    from mlx_specdec.errors import CheckpointError

    file = tmp_path / "c.safetensors"
    file.write_bytes(b"nothing of use")
    heads = initial_heads(base, 1, 1, own_output=False)
    with pytest.raises(CheckpointError, match="truncated or no safetensors"):
        fit_of(heads, counting(tmp_path / "rows", base.width), HeadsConfig(heads=1), file)
