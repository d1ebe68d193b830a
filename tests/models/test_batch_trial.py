"""Models are batched if a trial batch gives what each sequence gets alone, and say why not."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import stream_many
from mlx_specdec.models.mlx_lm.caches import BatchedCache
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.mlx_lm.trials import TRIAL_LENGTHS
from mlx_specdec.models.rows import Place
from mlx_specdec.types import Scores

from ..support.pairs import PROMPT, model_of, pair_of


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


def test_a_draft_model_that_fails_is_named_with_the_first_line_of_its_error() -> None:
    def damage(logits: mx.array, attempt: int) -> mx.array:
        raise RuntimeError("no kernel for this\nand a second line")

    pair = pair_of(model_of("llama"), damaged(damage))
    options = Options(max_tokens=2, proposer="draft", num_draft=2)
    run = stream_many(pair, [PROMPT, PROMPT], options, batch_size=2)
    assert run.why_not == (
        "draft cannot take several sequences in one pass: a trial pass failed (no kernel for this)"
    )


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
