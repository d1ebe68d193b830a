"""The order of places, against sorting them one by one."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.drafting import suffix_array as module
from mlx_specdec.drafting.suffix_array import suffix_array

texts = st.integers(0, 4).flatmap(lambda most: st.lists(st.integers(0, most), max_size=60))
BYTES_A_TOKEN = 40


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts, st.sampled_from([1, 2, 3, 8, 32]), st.sampled_from([1, 3, 16, 1 << 20]))
def test_places_are_in_the_order_of_what_begins_there(
    text: list[int], depth: int, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        places = suffix_array(np.array(text, np.int32), depth).tolist()
    assert sorted(places) == list(range(len(text)))
    begins = [text[place : place + depth] for place in places]
    assert begins == sorted(begins)


@pytest.mark.parametrize("kinds", [1, 2, 1000])
def test_at_most_forty_bytes_a_token_are_in_use(
    monkeypatch: pytest.MonkeyPatch, kinds: int
) -> None:
    monkeypatch.setattr(module, "PIECE", 1 << 12)
    count = 300_000
    text = np.random.default_rng(0).integers(0, kinds, count).astype(np.int32)
    tracemalloc.start()
    suffix_array(text, 32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak + text.nbytes) / count <= BYTES_A_TOKEN


def test_progress_runs_from_nothing_to_everything() -> None:
    calls: list[tuple[int, int]] = []
    suffix_array(np.array([1, 2, 1, 2, 1], np.int32), 4, lambda *call: calls.append(call))
    assert calls[0] == (0, 15)
    assert calls[-1] == (15, 15)
    assert calls == sorted(calls)
