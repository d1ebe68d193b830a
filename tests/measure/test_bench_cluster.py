"""What one machine would gain, from times of several: the closed form backwards."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_specdec.measure.analysis import Analysis, analyse, of_cluster
from mlx_specdec.measure.figures import RoundParts
from mlx_specdec.measure.prediction import Cluster
from mlx_specdec.measure.report import page

from ..support.bench_samples import measured, method, sample, setting
from ..support.estimates import CASES, EXPECTED, THRESHOLDS, costs, share

PLAIN = method("plain", "plain", 0)


def on_machines(name: str, machines: int, us: float, *, parts: bool = True) -> Analysis:
    """What bench would measure where the closed form is right, one token a plain step."""
    step, exchanges, cost, _ = costs(name)
    drafted, tokens, draft = CASES[name][3], CASES[name][5], CASES[name][6]
    part, network = share(name, machines), exchanges * us / 1000
    plain, verify = part * step + network, part * step * cost.passes[drafted + 1] + network
    analysis = analyse(
        measured(
            {"plain": [sample(10 * plain / 1000)], "draft": [sample(1.0, [(drafted, 1)])]},
            [PLAIN, method("draft", "draft", drafted)],
            [None],
        ),
        None,
    )
    assert analysis is not None
    first, second = analysis.methods
    times = RoundParts(draft / 1000, verify / 1000, 0.0) if parts else None
    return replace(analysis, methods=(first, replace(second, tokens_per_round=tokens, parts=times)))


def cluster(name: str, machines: int) -> Cluster:
    return Cluster(machines, "tensor", 0.0, costs(name)[1], share(name, machines), 0, None)


def figures(name: str, machines: int, us: float, **more: Any) -> Any:
    analysis = on_machines(name, machines, us, **more)
    seconds = {1: us / 1e6, CASES[name][3] + 1: us / 1e6}
    found = of_cluster(analysis, cluster(name, machines), seconds)
    return found, replace(analysis, cluster=found)


@pytest.mark.parametrize(("name", "machines", "even"), [threshold[:3] for threshold in THRESHOLDS])
@pytest.mark.parametrize("us", [30, 300])
def test_what_one_machine_gains_comes_out_again(
    name: str, machines: int, even: float, us: float
) -> None:
    step, _, cost, _ = costs(name)
    tokens, draft, drafted = CASES[name][5], CASES[name][6], CASES[name][3]
    [gain] = figures(name, machines, us)[0].gains
    assert gain.alone == pytest.approx(tokens * step / (cost.passes[drafted + 1] * step + draft))
    assert gain.break_even_us == pytest.approx(even, abs=0.51)


@pytest.mark.parametrize(
    ("us", "more"),
    [(300, {"parts": False}), (300, {"slower": 2}), (300, {"longer": 9})],
    ids=["rounds that were not timed", "sums as long as steps", "sums as long as rounds"],
)
def test_nothing_is_said_of_one_machine_where_times_do_not_tell(
    us: float, more: dict[str, Any]
) -> None:
    name = EXPECTED[0][0]
    analysis = on_machines(name, 2, us, parts=more.get("parts", True))
    seconds = {1: us * more.get("slower", 1) / 1e6, 4: us * more.get("longer", 1) / 1e6}
    found = of_cluster(analysis, cluster(name, 2), seconds)
    assert list(found.gains) == []
    assert "Nothing can be said of one machine" in found.text(analysis.plain_step)


def test_the_figures_are_reported_in_words_and_in_the_report() -> None:
    found, analysis = figures("27B, heads", 2, 300)
    [row] = found.table().rows
    assert (row[0], *row[2:]) == ("draft", "2.02", "57 us")
    text = found.text(analysis.plain_step)
    assert text.startswith(
        "2 machines (tensor): in a pass, an all_sum takes 300 us over 1 token, 300 us over 4 "
        "tokens; 128 exchanges take 38.40 of the 74.10 ms of a plain step"
    )
    shown = page(analysis, setting())
    assert "On several machines" in shown and "<td>57 us</td>" in shown
    assert "On several machines" not in page(replace(analysis, cluster=None), setting())
