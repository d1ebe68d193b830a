"""Orders arrive as they were sent, in sums whose sizes no rank can have otherwise."""

import gc
import threading

import mlx.core as mx
import pytest

from mlx_specdec.errors import DecodingError
from mlx_specdec.models.distributed.leader import SIZE, Leader, LedModel, follow
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.types import FINAL, Context

from ..support import tiny
from ..support.thread_ranks import ends


@pytest.mark.parametrize("count", [0, 1, 7, SIZE, 3 * SIZE])
def test_orders_arrive_with_their_numbers(count: int) -> None:
    _, first, second = ends()
    sent = (("rewind", 3, (9, 8)), ("open", 70_000, tuple(range(count))))
    first.send(sent)
    assert second.receive().orders == sent


def pair_of_ranks() -> tuple[Leader, threading.Thread, dict[int, Context], list[int]]:
    """Rank 0, and rank 1 in a thread with its contexts, each with a whole model of its own."""
    _, first, second = ends()
    plain, contexts, codes = DecoderOnlyModel(tiny.build("llama")), {}, []

    def work() -> None:
        codes.append(follow(plain, second, contexts))
        mx.clear_streams()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return Leader(first), thread, contexts, codes


def test_a_follower_has_the_contexts_of_rank_0() -> None:
    leader, thread, contexts, codes = pair_of_ranks()
    model = LedModel(DecoderOnlyModel(tiny.build("llama")), leader)
    one = model.open_batch([[5, 6, 7]])
    second = model.open_batch([[8, 9], [10, 11]])
    one.advance(mx.array([[5, 6, 7]]), proposed=2)
    one.rewind((2,))
    second.advance(mx.array([[8], [10]]))
    one.merge(second)
    one.keep([0, 2])
    del second
    gc.collect()
    one.evaluate()
    leader.end(7)
    thread.join(20)
    assert codes == [7]
    assert [context.lengths for context in contexts.values()] == [(2, 1)]


def test_nothing_is_led_any_more_after_half_a_pass() -> None:
    """After an error inside a pass, rank 0 is out of step and must not go on."""
    line, first, _ = ends()
    leader = Leader(first)
    model = LedModel(DecoderOnlyModel(tiny.build("llama")), leader)
    with leader.whole():
        assert model.open([1]).lengths == (0,)
    assert not model.lost
    with pytest.raises(RuntimeError), leader.whole():
        raise RuntimeError
    assert model.lost
    with pytest.raises(DecodingError, match="lost step"), leader.whole():
        raise AssertionError("never here")
    leader.end(0)
    assert line.sizes == [], "nobody is told: nobody would understand"


def test_an_interrupt_waits_until_all_ranks_have_done_the_same() -> None:
    leader, done = Leader(ends()[1]), []
    with pytest.raises(KeyboardInterrupt), leader.whole():
        leader._interrupt(2, None)
        done.append(FINAL)
    assert done == [FINAL]
    with leader.whole():
        done.append("goes on")
