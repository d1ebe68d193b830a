"""Models are batched if a trial batch gives what each sequence gets alone, and say why not."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import stream_many
from mlx_specdec.errors import OptionError
from mlx_specdec.models.mlx_lm.caches import BatchedCache
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.mlx_lm.trials import ATTEMPTS, MASK_AXES, TRIAL_LENGTHS, try_batches
from mlx_specdec.models.rows import Place
from mlx_specdec.types import Scores

from ..support import tiny
from ..support.pairs import PROMPT, model_of, pair_of
from ..support.thread_ranks import Rank, adding_up, on_every, ranks

EVERY = range(len(TRIAL_LENGTHS))
LAST = (ATTEMPTS - 1) * len(MASK_AXES)
"""The number of the last attempt with masks of 4 axes, which Llama needs."""


def damaged(
    damage: Callable[[mx.array, int], mx.array], model: DecoderOnlyModel | None = None
) -> DecoderOnlyModel:
    """Return a model after having its logits damaged. damage: takes the logits of a pass over a
    trial batch, and the number of the attempt from 0."""
    model = model or model_of("llama")
    run, attempt = model.run, -1

    def changed(tokens: mx.array, entries: list[Any] | None, hidden: Sequence[str] = ()) -> Scores:
        nonlocal attempt
        scores = run(tokens, entries, hidden)
        if len(tokens) < len(TRIAL_LENGTHS):
            return scores
        attempt += tokens.shape[1] == max(count for count, _ in TRIAL_LENGTHS)
        return replace(scores, logits=damage(scores.logits, attempt))

    model.run = changed  # type: ignore[method-assign]
    return model


def shifted(logits: mx.array, sequences: Sequence[int]) -> mx.array:
    """Return logits that are far off in some sequences of a batch."""
    logits[mx.array(list(sequences))] += mx.arange(logits.shape[-1])
    return logits


@pytest.mark.parametrize("sequence", EVERY)
def test_one_sequence_that_is_off_in_every_attempt_counts_as_rounding(sequence: int) -> None:
    model = damaged(lambda logits, attempt: shifted(logits, [sequence]))
    assert model.why_not_batched == ""


def test_attempts_that_are_off_are_followed_by_others() -> None:
    def damage(logits: mx.array, attempt: int) -> mx.array:
        return shifted(logits, EVERY) if attempt < LAST else logits

    assert not damaged(damage).why_not_batched


def test_the_reason_against_batches_is_the_least_distance_of_all_attempts() -> None:
    def damage(logits: mx.array, attempt: int) -> mx.array:
        far, near = shifted(logits + 0, [0, 1]), logits * 1.25
        return near if attempt == LAST else far

    model = damaged(damage)
    run = stream_many(pair_of(model, None), [PROMPT, PROMPT], Options(max_tokens=2), batch_size=2)
    assert run.why_not == (
        "target cannot take several sequences in one pass: in a trial its logits were off by 0.25 "
        "of their norm; 0.001 is allowed"
    )


def test_a_draft_model_that_fails_is_named_with_the_first_line_of_its_error() -> None:
    def damage(logits: mx.array, attempt: int) -> mx.array:
        raise RuntimeError("no kernel for this\nand a second line")

    pair = pair_of(model_of("llama"), damaged(damage))
    options = Options(max_tokens=2, proposer="draft", num_draft=2)
    run = stream_many(pair, [PROMPT, PROMPT], options, batch_size=2)
    assert run.why_not == (
        "draft cannot take several sequences in one pass: a trial pass failed (no kernel for this)"
    )


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt_bigcode", r"a trial pass failed \(.*[Oo]nly length-1 arrays can be converted.*\)"),
        ("llama4", "its caches of type ChunkedKVCache hold one sequence"),
        ("recurrent_gemma", "the recurrent state of an empty sequence is not zero"),
    ],
)
def test_families_that_take_one_sequence_say_why(family: str, reason: str) -> None:
    model = model_of(family)
    assert model.why_not_batched
    with pytest.raises(OptionError, match=rf"one sequence at a time: {reason}$"):
        model.open_batch([PROMPT, PROMPT])


def test_logits_that_are_no_numbers_prove_nothing_unless_only_the_batch_has_them() -> None:
    everywhere = model_of("llama")
    everywhere.network.lm_head.weight = everywhere.network.lm_head.weight * mx.nan
    assert not everywhere.why_not_batched
    never = damaged(lambda logits, attempt: logits * mx.nan)
    assert "off by inf of their norm" in never.why_not_batched


POSITIONS = {"longest": max, "shortest": min, "first": lambda starts: starts[0]}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("position", POSITIONS)
def test_one_position_for_all_sequences_is_found(
    monkeypatch: pytest.MonkeyPatch, position: str, dtype: mx.Dtype
) -> None:
    def offset(cache: BatchedCache) -> int:
        place = cache._rows.place
        return POSITIONS[position](place.starts) + (place.rows if cache._written is place else 0)

    monkeypatch.setattr(BatchedCache, "offset", property(offset))
    assert model_of("llama", dtype).why_not_batched


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("wrong", ["of the first sequence", "one token wider", "of the longest"])
def test_a_wrong_mask_is_found(
    monkeypatch: pytest.MonkeyPatch, wrong: str, dtype: mx.Dtype
) -> None:
    visible = Place.visible

    def changed(place: Place, window: int | None = None) -> mx.array:
        mask = visible(place, window)
        if wrong == "one token wider":
            return mx.arange(place.end) <= place.targets + 1
        row = 0 if wrong == "of the first sequence" else place.starts.index(max(place.starts))
        return mx.broadcast_to(mask[row], mask.shape)

    monkeypatch.setattr(Place, "visible", changed)
    assert model_of("llama", dtype).why_not_batched


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_make_as_many_attempts_as_rank_0(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def damage(logits: mx.array, attempt: int) -> mx.array:
        raise RuntimeError("no kernel for this")

    def mask_axes(rank: Rank) -> int | None:
        model = DecoderOnlyModel(tiny.build("llama"))
        model.group = rank  # type: ignore[assignment]
        if rank.rank() == failing:
            damaged(damage, model)
        # A cached property would make the threads wait for each other.
        return try_batches(model, model._opened).mask_axes

    group = ranks(2)
    with adding_up(monkeypatch):
        assert on_every(group, mask_axes) == [None if failing == 0 else 4] * 2
    attempts = ATTEMPTS * len(MASK_AXES) if failing == 0 else 1
    assert [rank.sums for rank in group] == [attempts] * 2
