"""The straightforward T5 that a step is measured against computes the same, and turns are fair."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import measure_t5_step as script

from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parent / "fixtures" / "t5"
SEEN = [0, 5, 9, 3]


@pytest.mark.parametrize("kind", ["own-head-gated-gelu", "tied-scaled-relu", "umt5-untied"])
def test_both_of_our_steps_give_the_same_logits_again_and_again(kind: str) -> None:
    model = load_model(FIXTURES / kind, dtype="float32").model
    source = [7, 8, 9, 10, 11]
    steps = [make(model, source, SEEN) for make in (script.our_step, script.simple_step)]
    first, second = (step().copy() for step in steps)
    assert first.shape == (model.vocabulary,)
    assert script.check([first, second]) < 1e-4
    for step, logits in zip(steps, (first, second), strict=True):
        assert np.array_equal(step(), logits), "what the step added was not taken back"


def test_models_that_differ_are_not_timed() -> None:
    with pytest.raises(SystemExit, match="not the same models"):
        script.check([np.array([1.0, 2.0]), np.array([1.0, 2.1])])


def test_medians_and_ratios_leave_out_the_first_turns() -> None:
    now = [0.0]

    def taking(*each: float) -> script.Step:
        left = iter([seconds for turn in each for seconds in (9.0, 9.0, turn)])

        def step() -> np.ndarray:
            now[0] += next(left)
            return np.zeros(1)

        return step

    steps = [
        script.Timed("ours", taking(7, 7, 1, 2, 4)),
        script.Timed("other", taking(7, 7, 3, 4, 4)),
    ]
    found = script.figures(steps, 3, lambda: now[0])
    assert found["milliseconds"] == {"ours": 2000, "other": 4000}
    assert found["over ours"] == {"other": 2.0}
