"""What is measured before a pair's first text: drafting, verifying alone, and reading."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_specdec.draft_length.auto_length import Source
from mlx_specdec.draft_length.costs import MOST, Costs, unknown
from mlx_specdec.draft_length.length import DraftLength, FixedLength
from mlx_specdec.draft_length.saved import as_knowledge, costs_of
from mlx_specdec.engine.opening import make_proposer
from mlx_specdec.interfaces.results import RoundTimes
from mlx_specdec.measure.calibrate import FIRST_LENGTHS, Survey
from mlx_specdec.options import Options
from mlx_specdec.proposers.drafter import Drafter, Setup

from ..support.draft_length_simulator import LOOKUP, a_round
from ..support.mocks import Guesser

DRAFT = Source("draft")


@pytest.mark.parametrize("rows", [1, 4])
def test_verifying_and_reading_are_told_apart_from_drafting(rows: int) -> None:
    survey = Survey([DRAFT, LOOKUP], FIRST_LENGTHS, rows=rows, turns=6)
    survey.begin_text(8)
    position, unread = 1, 8
    while not survey.done:
        count = survey.choose(1000)
        drafting, verifying = 0.2 * count, 1.0 + 0.1 * count
        if count:
            drafting += 0.02 * unread
        took = RoundTimes(drafting + verifying, drafting if count else None)
        report = a_round(count, 0, 0.0, position=position, context=8)
        report = replace(report, times=took, sequences=report.sequences * rows)
        survey.on_round(report)
        position += 1
        unread = 0 if count else unread + 1
    known = {name: costs_of(survey.knowledge, name) for name in ("draft", "free")}
    assert len(survey.knowledge) == 2 and all(set(sizes) == {rows} for sizes in known.values())
    costs = Costs({name: sizes[rows] for name, sizes in known.items()})
    costs.behind(0)
    for name, each in (("draft", 0.3), ("free", 0.1)):
        measured = costs.rounds(name, 16)[0][[*FIRST_LENGTHS]].tolist()
        assert measured == pytest.approx([1 + each * n for n in FIRST_LENGTHS], rel=0.06)
    assert costs.reading("draft", 10)[0] == pytest.approx(0.2, rel=0.5)


def test_rounds_of_fewer_rows_do_not_count_and_what_single_texts_cost_remains() -> None:
    alone = unknown()
    alone.mean[:MOST] = [0.1 * n for n in range(MOST)]
    known = as_knowledge({"draft": {1: alone}})
    survey = Survey([DRAFT], FIRST_LENGTHS, rows=4, known=known, turns=1)
    while not survey.done:
        survey.on_round(a_round(survey.choose(1000), 0, 1.0))
    assert (costs_of(survey.knowledge, "draft")[4].mean == alone.resized(4).mean).all()


def test_each_texts_first_draft_reads_its_prompt() -> None:
    survey = Survey([DRAFT], FIRST_LENGTHS, turns=8)
    for until in (4, 8):
        survey.begin_text(200)
        unread, position = 200, 1
        while survey.turns < until:
            count = survey.choose(1000)
            seconds = 1.0 + 0.3 * count + (0.02 * unread if count else 0.0)
            survey.on_round(a_round(count, 0, seconds, position=position))
            unread, position = 0 if count else unread + 1, position + 1
    costs = Costs({"draft": costs_of(survey.knowledge, "draft")[1]})
    assert costs.rounds("draft", 1)[0][1] == pytest.approx(1.3, rel=0.05)
    cost, dearer = costs.reading("draft", 100)
    assert cost == pytest.approx(2.0, rel=0.15) and dearer < 1.3 * cost


@pytest.mark.parametrize(
    ("lengths", "batch", "eager"),
    [
        (Survey([DRAFT], FIRST_LENGTHS), False, False),
        (FixedLength(2), False, True),
        (FixedLength(2), True, False),
    ],
)
def test_a_drafter_reads_prompts_beside_the_target_where_drafts_come_first(
    lengths: DraftLength, batch: bool, eager: bool
) -> None:
    setups: list[Setup] = []

    def make(setup: Setup) -> Guesser:
        setups.append(setup)
        return Guesser(lambda position, limit: [])

    make_proposer([Drafter("draft", make, nbytes=1)], Options(), lengths, batch=batch)
    assert {setup.eager for setup in setups} == {eager}
