"""Orders arrive as they were sent, in sums whose sizes no rank can have otherwise."""

import pytest

from mlx_specdec.errors import DecodingError
from mlx_specdec.models.distributed.leader import SIZE, Leader, LedModel, receive
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.types import FINAL

from ..support import tiny
from ..support.thread_ranks import Line


@pytest.mark.parametrize("count", [0, 1, 7, SIZE, 3 * SIZE])
def test_orders_arrive_with_their_numbers(count: int) -> None:
    line = Line()
    leader, sent = Leader(line.first), (("rewind", 3, (9, 8)), ("open", 1, tuple(range(count))))
    leader.queue(sent[0])
    leader.send(sent[1])
    assert receive(line.second).orders == sent


def test_nothing_is_led_any_more_after_half_a_pass() -> None:
    """After an error inside a pass, rank 0 is out of step and must not go on."""
    line = Line()
    leader = Leader(line.first)
    model = LedModel(DecoderOnlyModel(tiny.build("llama")), leader, True, "")
    with leader.whole():
        assert model.open_batch([[1]]).lengths == (0,)
    assert not model.lost
    with pytest.raises(RuntimeError), leader.whole():
        raise RuntimeError
    assert model.lost
    with pytest.raises(DecodingError, match="lost step"), leader.whole():
        raise AssertionError("never here")
    leader.end(0)
    assert line.sizes == [], "nobody is told: nobody would understand"


def test_an_interrupt_waits_until_all_ranks_have_done_the_same() -> None:
    leader, done = Leader(Line().first), []
    with pytest.raises(KeyboardInterrupt), leader.whole():
        leader._interrupt(2, None)
        done.append(FINAL)
    assert done == [FINAL]
    with leader.whole():
        done.append("goes on")
