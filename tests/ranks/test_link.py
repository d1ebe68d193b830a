"""Sums over ranks are timed on all of them at once, and nothing of it is left."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_specdec.measure.passes import LinkTimer
from mlx_specdec.models.distributed.group import Ranks
from mlx_specdec.models.distributed.orders import SIZE
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import thread_ranks, tiny
from ..support.thread_ranks import Rank, adding_up


class Shapes:
    """What a rank has added up."""

    def __init__(self, rank: Rank) -> None:
        self.shapes: list[tuple[int, ...]] = []
        plain = rank.add_up

        def noted(part: mx.array) -> mx.array:
            self.shapes.append(part.shape)
            return plain(part)

        rank.add_up = noted  # type: ignore[method-assign]


def test_all_ranks_add_up_what_passes_do_as_often_as_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = thread_ranks.ranks(2)
    seen = [Shapes(rank) for rank in group]

    def work(rank: Rank) -> dict[int, float]:
        ranks = Ranks(rank)  # type: ignore[arg-type]
        model = DecoderOnlyModel(tiny.build("llama"))
        try:
            target = ranks.share(model)
        except SystemExit as end:
            assert end.code == 0
            return {}
        timer = LinkTimer(ranks, target, [3, 1, 3], sums=5)
        assert timer.seconds() == {}
        timer.turn(2)
        scores = target.open([1, 2]).advance(mx.array([[3]]))
        mx.eval(scores.logits)
        ranks.end(0)
        return timer.seconds()

    with adding_up(monkeypatch):
        told, nothing = thread_ranks.on_every(group, work)
    assert list(told) == [1, 3] and all(each > 0 for each in told.values()) and nothing == {}
    width = tiny.build("llama").args.hidden_size
    once = [(SIZE,), *[(1, 1, width)] * 6, (SIZE,), *[(1, 3, width)] * 6]
    assert [each.shapes for each in seen] == [[*once, *once, (SIZE,), (SIZE,)]] * 2
