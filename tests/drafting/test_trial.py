"""When a drafter has failed: what counts, and that it is said once."""

from __future__ import annotations

import pytest

from mlx_specdec.proposers.drafter import Trial

Proposals = list[tuple[int, int]]


def caution_after(proposals: Proposals) -> str:
    trial = Trial()
    for drafted, accepted in proposals:
        trial.count(drafted, accepted)
    return trial.caution("weights/some")


@pytest.mark.parametrize(
    ("proposals", "failed"),
    [
        pytest.param([(4, 0)] * 16, True, id="64 tokens, none of them accepted"),
        pytest.param([(4, 0)] * 15 + [(3, 0)], False, id="63 tokens are too few"),
        pytest.param([(1, 0)] * 58 + [(1, 1)] * 6, True, id="6 of 64 are less than one in ten"),
        pytest.param([(1, 0)] * 57 + [(1, 1)] * 7, False, id="7 of 64 are more"),
        pytest.param([(16, 0)] * 15, False, id="of long proposals too few were looked at"),
        pytest.param([(16, 0)] * 16, True, id="of more of them there were enough"),
        pytest.param([(16, 0), (16, 1)] * 8, False, id="a third right, however much was drafted"),
        pytest.param([(1, 1)] * 64 + [(1, 0)] * 2000, False, id="it was right once"),
        pytest.param([], False, id="nothing was drafted"),
    ],
)
def test_a_drafter_fails_where_hardly_anything_that_was_looked_at_is_accepted(
    proposals: Proposals, failed: bool
) -> None:
    assert bool(caution_after(proposals)) == failed


def test_it_is_said_once_with_figures_and_causes() -> None:
    trial = Trial()
    for accepted in (0, 1, *(0,) * 14):
        trial.count(4, accepted)
    assert trial.caution("weights/some", ", or else") == (
        "hardly any draft tokens are accepted (1 of 64): weights/some was probably made for "
        "another target, or for the model that this one was fine-tuned from, or else"
    )
    trial.count(4, 0)
    assert trial.caution("weights/some") == ""
