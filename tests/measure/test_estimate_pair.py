import json
from dataclasses import replace

import pytest

from mlx_specdec.errors import CheckpointError, OptionError, PromptError
from mlx_specdec.measure.estimate import ModelSource, estimate, speeds
from mlx_specdec.measure.passes import SIZES, STEPS, PassCosts, extended, parts
from mlx_specdec.measure.prediction import (
    ALPHAS,
    LONGEST_DRAFT,
    Estimate,
    RoundCost,
    best,
    speedups,
)

from ..support import tiny
from ..support.estimates import LLAMA, QUICK, T5, ticking

DRAFT_T5 = {**T5, "num_decoder_layers": 1}


def test_speeds_are_seconds_in_the_unit_of_a_plain_step() -> None:
    passes = {1: 2.2, 2: 2.4, 3: 2.6, 4: 2.8, 5: 3.0, 9: 3.8, 17: 5.4}
    target = PassCosts(None, passes, step=2.0)
    draft = PassCosts(0.3, {}, start=0.1)
    found = speeds(target, draft)
    assert found.draft_cost == pytest.approx(0.15)
    assert found.passes == pytest.approx([1 + 0.1 * m for m in range(1, 18)])
    assert found.start == pytest.approx(0.05)
    cost = RoundCost(found.draft_cost, dict(enumerate(found.passes, start=1)), found.start)
    for one in found.predictions:
        again = best(cost, one.alpha, 16)
        assert one.num_draft == again.num_draft and one.speed_up == pytest.approx(again.speed_up)
    assert [p.alpha for p in found.predictions] == [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]


def test_the_best_length_is_the_best_of_all_and_none_where_nothing_gains() -> None:
    cost = RoundCost(draft=0.1, passes={1: 1.0, 17: 1.8})
    for alpha in ALPHAS:
        chosen = best(cost, alpha, 16)
        every = speedups(cost, [alpha**place for place in range(1, 17)])
        assert chosen.speed_up == max(every) == every[chosen.num_draft]
    lengths = [best(cost, alpha, 16).num_draft for alpha in ALPHAS]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    dear = best(RoundCost(draft=0.9, passes={1: 1.0, 2: 2.0}), 0.95, 16)
    assert (dear.num_draft, dear.speed_up) == (0, 1)


def test_as_much_of_the_prompt_is_read_as_a_tenth_of_the_time_promises() -> None:
    model = ModelSource("llama", LLAMA)
    for seconds, notes in ((1e9, 0), (60.0, 1)):
        many = {**QUICK, "prompt_tokens": 64, "seconds": seconds, "turns": 1}
        found = estimate(model, model, **many, clock=ticking())
        remarks = [note for note in found.notes if "of the prompt's 64 tokens" in note]
        assert len(remarks) == notes
        assert "read_tokens" not in found.as_dict()


def test_every_time_of_a_model_is_extended_to_all_its_layers() -> None:
    def costs(depth: int, sizes: tuple[int, ...] = (1, 4)) -> PassCosts:
        return PassCosts(
            draft=0.4 + 0.2 * depth,
            passes={m: 0.6 + 0.1 * m * depth for m in sizes},
            start=0.1 * depth,
            step=0.5 + 0.1 * depth,
        )

    # A size that time sufficed for at one depth alone is no size.
    full = extended(costs(2), costs(5, (1, 4, 9)), (2, 5), 40)
    assert full.step == pytest.approx(costs(40).step)
    assert full.draft == pytest.approx(costs(40).draft)
    assert full.passes == pytest.approx(costs(40).passes)
    assert full.start == pytest.approx(costs(40).start)


def test_times_that_vary_or_rest_on_one_sample_are_remarked_on() -> None:
    pair = ModelSource("big", LLAMA), ModelSource("small", tiny.CONFIGS["llama"])
    measured = estimate(*pair, **QUICK, clock=ticking())
    assert measured.speeds is not None and measured.speeds.samples == 1
    assert any("measured once" in note for note in measured.notes)
    passes = dict.fromkeys(SIZES, 1.0)
    quiet = PassCosts(None, passes, step=1.0, spread=0.01, samples=5)
    draft = PassCosts(0.1, {}, spread=0.02, samples=4)
    busy = replace(quiet, spread=0.3)
    assert extended(quiet, busy, (1, 2), 3).spread == 0.3
    assert extended(quiet, replace(busy, samples=1), (1, 2), 3).samples == 1
    found = speeds(quiet, draft)
    assert (found.spread, found.samples) == (0.02, 4)
    notes = replace(measured, speeds=found).notes
    assert not any("busy" in note or "once" in note or "sufficed" in note for note in notes)
    assert any(
        "varied by 30%" in note for note in replace(measured, speeds=speeds(busy, draft)).notes
    )
    short = speeds(replace(quiet, passes={1: 1.0, 3: 1.2}), draft)
    assert any("up to 2 tokens" in note for note in replace(measured, speeds=short).notes)


@pytest.mark.parametrize("pair", [(T5, DRAFT_T5), (LLAMA, tiny.CONFIGS["llama"])])
def test_a_pair_is_measured_from_its_configurations(pair: tuple[dict, dict]) -> None:
    found = estimate(
        ModelSource("big", pair[0]), ModelSource("small", pair[1]), **QUICK, clock=ticking()
    )
    assert found.fits and found.speeds is not None
    # Everything took one tick: STEPS plain steps, one draft or many, a step and a pass of any size.
    assert (found.speeds.draft_cost, found.speeds.start) == (0, STEPS)
    assert found.speeds.passes == (0.0,) * 17
    # A round costs STEPS plain steps, and at alpha 0.95 it emits more tokens than that.
    assert [p.num_draft for p in found.speeds.predictions] == [0, 0, 0, 0, 16, 16]
    assert found.target.measured_layers is None is found.draft.measured_layers
    assert (found.target.name, found.draft.name) == ("big", "small")
    written = json.loads(json.dumps(found.as_dict()))
    assert written["speeds"]["predictions"][0]["alpha"] == 0.5
    assert written["memory_bytes"] == found.target.bytes + found.draft.bytes
    assert not any("extrapolated" in note for note in written["notes"])


@pytest.mark.parametrize("family", ["mamba2", "gemma3"])
def test_passes_of_every_kind_of_cache_are_taken_back(family: str) -> None:
    settings = ModelSource(family, tiny.CONFIGS[family])
    # Longer than the windows.
    found = estimate(settings, settings, **{**QUICK, "prompt_tokens": 40}, clock=ticking())
    assert found.speeds is not None
    assert len(found.speeds.passes) == LONGEST_DRAFT + 1


def test_a_large_model_is_measured_on_a_few_layers_and_the_result_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "mlx_specdec.measure.passes.parts", lambda model: parts(model, most=100_000, least=1)
    )
    found = estimate(
        ModelSource("big", LLAMA),
        ModelSource("small", tiny.CONFIGS["llama"]),
        **QUICK,
        clock=ticking(),
    )
    assert found.target.measured_layers == (1, 3) and found.target.layers == 10
    assert found.draft.measured_layers is None
    assert any("1 and 3 of its 10 layers" in note for note in found.notes)
    # Both depths took the same time, so the line is flat.
    assert found.speeds is not None and found.speeds.step_seconds == 1 / STEPS


def test_a_pair_that_does_not_fit_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "mlx_specdec.measure.estimate.usable_memory"
    monkeypatch.setattr(limit, lambda: 1000)

    def no_clock() -> float:
        raise AssertionError("something was measured")

    pair = ModelSource("big", LLAMA), ModelSource("small", tiny.CONFIGS["llama"])
    found = estimate(*pair, **QUICK, clock=no_clock)
    assert not found.fits and found.speeds is None
    assert found.memory_bytes > 1000 == found.memory_limit_bytes
    assert found.as_dict()["fits"] is False
    need = found.memory_bytes
    monkeypatch.setattr(limit, lambda: need)
    just = estimate(*pair, **QUICK, clock=ticking())
    assert just.fits and just.speeds is not None
    assert need == sum(
        side.weights_bytes + side.caches_bytes for side in (found.target, found.draft)
    )


def test_sizes_are_announced_before_anything_is_measured_and_the_time_is_kept() -> None:
    clock, announced = ticking(), []
    pair = ModelSource("big", LLAMA), ModelSource("small", tiny.CONFIGS["llama"])

    def announce(sizes: Estimate) -> None:
        announced.append((sizes, clock()))

    found = estimate(*pair, **{**QUICK, "seconds": 12.0}, clock=clock, announce=announce)
    [(first, at)] = announced
    assert at == 0 and first.fits and first.speeds is None and first.target == found.target
    assert clock() < 12 + 4
    assert found.speeds is None
    *_, last = found.notes
    assert [note for note in found.notes if "--seconds" in note] == [last]


def test_what_cannot_be_estimated_is_reported_in_a_sentence() -> None:
    llama = ModelSource("llama", tiny.CONFIGS["llama"])
    with pytest.raises(OptionError, match="draft of the target's own kind"):
        estimate(ModelSource("t5", T5), llama)
    with pytest.raises(CheckpointError, match="not supported"):
        estimate(ModelSource("x", {"model_type": "nosuch"}), llama)
    short = ModelSource("short", {**tiny.CONFIGS["llama"], "max_position_embeddings": 5})
    with pytest.raises(PromptError, match="takes 5"):
        estimate(short, short, **QUICK)
    # MLX has no such kernel for the CPU.
    mixtral = ModelSource("mixtral", tiny.CONFIGS["mixtral"], dtype="bfloat16")
    with pytest.raises(OptionError, match="MLX cannot run") as caught:
        estimate(mixtral, mixtral, **QUICK)
    assert "\n" not in str(caught.value)
