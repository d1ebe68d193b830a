"""Decoding keeps a share of the device while prompts are prefilled, whoever prefills them."""

from typing import Any

import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.engine.memory import BatchSize
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.engine.turns import Turns

from ..support.pairs import decoder_only

OPTIONS = Options(max_tokens=60, regular=True, prefill_step_size=4)
CHUNK, ROUND = 8.0, 1.0
"""Seconds of a chunk and of a round on the fake clock."""


class Device:
    """A clock that passes and chunks move on, and a line for each of them."""

    def __init__(self) -> None:
        self.now, self.turns_taken = 0.0, ""

    def __call__(self) -> float:
        return self.now

    def took(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.turns_taken += what


def scheduler_on(device: Device, turns: Turns, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Scheduler(decoder_only("llama"), None, OPTIONS, BatchSize(4), turns=turns)
    made._watch.clock = device
    prefill, decode = made._prefill, made.decode

    def prefilled(group: Any) -> None:
        prefill(group)
        device.took(name.upper(), CHUNK)

    def decoded() -> Any:
        if made._running:
            device.took(name, ROUND)
        return decode()

    monkeypatch.setattr(made, "_prefill", prefilled)
    monkeypatch.setattr(made, "decode", decoded)
    return made


@pytest.mark.parametrize("models", [1, 2])
def test_while_one_prompt_is_prefilled_others_decode_a_third_of_the_time(
    models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    turns = Turns(device)
    first = scheduler_on(device, turns, "a", monkeypatch)
    other = first if models == 1 else scheduler_on(device, turns, "b", monkeypatch)
    other.add(0, Request([5, 6], OPTIONS))
    other.step()
    other.step()
    device.turns_taken = ""
    first.add(1, Request(list(range(3, 44)), OPTIONS))
    while device.turns_taken.count("A") < 10:
        other.step()
        if first is not other and turns.may_prefill(wait=False):
            first.step()
    # Ten chunks of eight seconds, and between two of them four rounds of a second.
    own = "a" if models == 1 else "b"
    assert set(device.turns_taken.split("A")[1:-1]) == {own * 4}, device.turns_taken


def test_a_prompt_waits_for_nobody_if_nothing_is_decoded() -> None:
    device = Device()
    turns = Turns(device)
    turns.prefilled(CHUNK)
    assert turns.may_prefill(wait=True)
    turns.decodes(device, True)
    assert not turns.may_prefill(wait=False)
    device.now += CHUNK / 2
    assert turns.may_prefill(wait=False)


@pytest.mark.parametrize(
    ("decodes", "exact", "chunks"),
    [(True, False, [512, 128, 128, 256]), (True, True, [512, 512]), (False, False, [512, 512])],
)
def test_chunks_that_take_long_become_shorter_while_others_wait(
    decodes: bool, exact: bool, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact passes depend on where chunks end, so that these keep their lengths."""
    device, taken = Device(), list[int]()
    turns, options = Turns(device), Options(max_tokens=1, regular=True, exact=exact)
    made = Scheduler(decoder_only("llama"), None, options, BatchSize(4), turns=turns)
    made._watch.clock, prefill = device, made._prefill

    def prefilled(group: Any) -> None:
        before = group.to_prefill
        prefill(group)
        taken.append(before - group.to_prefill)
        device.took("A", {1: 8.0, 2: 2.0}.get(len(taken), 1.0))

    monkeypatch.setattr(made, "_prefill", prefilled)
    made.add(0, Request([3] * 1025, options))
    while not made.idle:
        made.step()
        turns.decodes(device, decodes)
        device.now += CHUNK
        turns.decodes(device, False)
    assert [count for count in taken if count] == chunks
