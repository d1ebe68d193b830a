"""Costs of passes, on a clock that passes of a known price move."""

from dataclasses import dataclass, field

import pytest

from mlx_specdec.measure.passes import CHAIN, PassCosts, PassTimer, opened, parts, pattern
from mlx_specdec.models.loading import outline

from ..support import tiny
from ..support.priced import STALL, Clock, PricedModel

PROMPT = [1, 2, 3]
SIZES = (1, 2, 3, 5, 13)


def timed(timer: PassTimer, turns: int) -> PassCosts:
    timer.turn(turns)
    costs = timer.costs()
    assert costs is not None
    return costs


def test_passes_cost_what_they_cost_behind_a_draft() -> None:
    clock = Clock()
    target, draft = PricedModel(clock, 2.0, 0.5), PricedModel(clock, 0.25, 0.0)
    timer = PassTimer(
        opened(target, PROMPT), sizes=SIZES, draft=opened(draft, PROMPT), steps=True, clock=clock
    )
    draft.context.begins = 0.125
    assert timer.costs() is None
    costs = timed(timer, 3)
    assert (costs.draft, costs.start, costs.step) == pytest.approx((0.25, 0.125, 2.5))
    assert costs.passes == pytest.approx({m: 2 + 0.5 * m for m in SIZES})
    assert costs.samples == 2 and costs.spread == 0


def test_without_a_draft_passes_are_behind_a_step_of_the_target() -> None:
    clock = Clock()
    target = PricedModel(clock, 2.0, 0.5)
    timer = PassTimer(opened(target, PROMPT), sizes=SIZES, clock=clock)
    # What runs first waits for its graph, and no pass behind it does.
    target.context.begins = 0.5
    costs = timed(timer, 2)
    assert costs.draft is None and costs.step == costs.start == 0
    assert costs.passes == pytest.approx({m: 2 + 0.5 * m for m in SIZES})


def test_everything_but_plain_steps_is_taken_back_and_a_stall_moves_no_median() -> None:
    clock = Clock()
    target, draft = PricedModel(clock), PricedModel(clock)
    timer = PassTimer(opened(target, PROMPT), sizes=SIZES, draft=opened(draft, PROMPT), clock=clock)
    held = target.context.lengths, draft.context.lengths
    # All of the first turn warms up, and one later pass of each model stalls.
    a_turn = len(SIZES)
    target.context.stalled = (*range(2, 2 + a_turn), 2 + a_turn + 2)
    a_turn = 1 + CHAIN + len(SIZES)
    draft.context.stalled = (*range(2, 2 + a_turn), 2 + a_turn + 3)
    costs = timed(timer, 4)
    assert (target.context.lengths, draft.context.lengths) == held
    assert costs.draft is not None
    assert max(costs.draft, costs.start, *costs.passes.values()) < STALL


MIB = 1 << 20


@dataclass
class Layers:
    """An outline of which only the layers matter."""

    layers: str
    layer_mib: int
    nbytes: int = 2 << 30
    layer_nbytes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.layer_nbytes = [self.layer_mib * MIB] * len(self.layers)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("aaaaaaaa", (0, 1)),
        ("baaaaaaa", (1, 1)),
        ("abababab", (0, 2)),
        ("sssssg" * 4 + "ss", (0, 6)),
        ("sssssgsssssgssssss", (12, 1)),
        ("dddabababab", (3, 2)),
        ("abcdefgh", (0, 8)),
    ],
)
def test_the_pattern_of_layers_is_found(layers: str, expected: tuple[int, int]) -> None:
    assert pattern(layers) == expected


def test_parts_are_too_large_for_a_processors_cache_and_hold_whole_patterns() -> None:
    # 128 MiB need five layers of 30, and 256 MiB more another nine.
    assert parts(Layers("a" * 32, 30)) == (5, 14)
    assert parts(Layers("a" * 8, 900)) == (1, 3)
    assert parts(Layers("b" + "a" * 31, 30)) == (6, 15)
    few, more = parts(Layers("sssssg" * 8, 30)) or (0, 0)
    assert (few, more) == (6, 18)


def test_layers_of_real_families_are_distinguished() -> None:
    def found(family: str, **changes: object) -> tuple[int, int]:
        return pattern(outline({**tiny.CONFIGS[family], **changes}, family).layers)

    assert found("llama", num_hidden_layers=6) == (0, 1)
    assert found("gemma3", num_hidden_layers=6) == (0, 2)
    assert found("deepseek_v3", num_hidden_layers=6) == (1, 1)
    assert found("qwen3_next", num_hidden_layers=6) == (0, 2)
