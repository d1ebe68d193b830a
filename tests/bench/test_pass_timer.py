"""What is timed between the texts of a benchmark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specdec.errors import PromptError
from mlx_specdec.measure.methods import ALWAYS_TIMED, pass_timer

from ..support.priced import Clock, PricedModel

PROMPT = [1, 2, 3]


def test_passes_of_all_rounds_are_timed_and_a_draft_is_fed_in_its_own_tokens() -> None:
    clock = Clock()
    target, draft = PricedModel(clock, 2.0, 0.5), PricedModel(clock, 0.25, 0.0)
    translation = SimpleNamespace(feed=lambda prompt: [4 for _ in prompt])
    pair: Any = SimpleNamespace(target=target, draft=draft, translation=translation)
    timer = pass_timer([pair], PROMPT, [3, 12, "auto"], clock)
    timer.turn(2)
    costs = timer.costs()
    assert costs is not None and costs.draft == pytest.approx(0.25)
    rows = [*range(1, ALWAYS_TIMED + 1), 13]
    assert costs.passes == pytest.approx({m: 2 + 0.5 * m for m in rows})
    assert (target.prompts, draft.prompts) == ([PROMPT], [[4, 4, 4]])


def test_without_a_draft_no_draft_step_is_timed() -> None:
    clock = Clock()
    pair: Any = SimpleNamespace(target=PricedModel(clock), draft=None, translation=None)
    timer = pass_timer([pair], PROMPT, [], clock)
    timer.turn()
    costs = timer.costs()
    assert costs is not None and costs.draft is None
    assert sorted(costs.passes) == list(range(1, ALWAYS_TIMED + 1))


def test_a_draft_that_cannot_take_the_prompt_is_left_out() -> None:
    class Short(PricedModel):
        def open(self, prompt, progress=None):
            raise PromptError("too long")

    clock = Clock()
    pair: Any = SimpleNamespace(target=PricedModel(clock), draft=Short(clock), translation=None)
    timer = pass_timer([pair], PROMPT, [], clock)
    timer.turn()
    costs = timer.costs()
    assert costs is not None and costs.draft is None and costs.passes
