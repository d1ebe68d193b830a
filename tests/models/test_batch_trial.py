"""Models are batched if a trial batch gives what each sequence gets alone, and say why not."""

import mlx.core as mx
import pytest

from mlx_specdec.models.mlx_lm.caches import BatchedCache
from mlx_specdec.models.rows import Place

from ..support.pairs import model_of

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
