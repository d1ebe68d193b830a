"""What is collected for training."""

from __future__ import annotations

from mlx_specdec.training.collect import batches


def test_batches_hold_every_prompt_once_and_lengths_that_are_close() -> None:
    lengths = [7, 3, 9, 3, 8, 1, 30, 2, 31, 29, 5]
    found = batches(lengths, 3, seed=1)
    assert sorted(number for batch in found for number in batch) == list(range(11))
    assert {tuple(sorted(lengths[n] for n in batch)) for batch in found} == {
        (1, 2, 3),
        (3, 5, 7),
        (8, 9, 29),
        (30, 31),
    }
    assert found == batches(lengths, 3, seed=1)
    assert found != batches(lengths, 3, seed=2)


def test_batches_keep_kinds_apart_that_take_turns() -> None:
    lengths = [7, 3, 9, 3, 8, 1, 30, 2]
    found = batches(lengths, 2, seed=1, kinds=2)
    assert sorted(number for batch in found for number in batch) == list(range(8))
    assert {tuple(sorted(lengths[n] for n in batch)) for batch in found} == {
        (7, 8),
        (9, 30),
        (1, 2),
        (3, 3),
    }
