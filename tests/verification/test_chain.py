"""The arithmetic that rules share."""

from __future__ import annotations

import mlx.core as mx

from mlx_specdec.verification.rules import leading, row_after


def test_only_the_prefix_before_the_first_rejection_is_kept() -> None:
    accepted = mx.array([[True, True, False, True], [False, True, True, True]])
    assert leading(accepted).tolist() == [[True, True, False, False], [False] * 4]


def test_an_empty_proposal_keeps_nothing() -> None:
    assert leading(mx.zeros((1, 0), dtype=mx.bool_)).shape == (1, 0)


def test_the_row_after_the_kept_ones_is_taken_per_sequence() -> None:
    rows = mx.arange(24).reshape(2, 4, 3)
    kept = mx.array([[True, False, False], [True, True, True]])
    assert row_after(rows, kept).tolist() == [[3, 4, 5], [21, 22, 23]]
    flat = mx.arange(8).reshape(2, 4)
    assert row_after(flat, kept).tolist() == [1, 7]
