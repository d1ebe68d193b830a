"""The wired limit: the evaluated weights of large models, until the process or the server ends."""

import atexit
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.models import wired_memory
from mlx_specdec.models.loading import load_model

from ..support.models import make_llama, make_t5

EARLIER = 7
"""The limit before the first model, in bytes."""
ROOM = 1 << 16
"""Bytes that are evaluated in addition to weights, such as the frequencies of rotations."""


class Mac:
    """MLX's functions on a Mac. limits: the wired limits that were set, in bytes. evaluated: MLX's
    bytes when each limit was set. at_exit: functions to run when the process ends."""

    def __init__(self) -> None:
        self.memory, self.recommended = 1 << 10, 1 << 40
        self.limits: list[int] = []
        self.evaluated: list[int] = []
        self.at_exit: list[Callable[[], None]] = []

    def device_info(self, device: Any = None) -> dict[str, int]:
        assert device == mx.gpu
        return {
            "memory_size": self.memory,
            "max_recommended_working_set_size": self.recommended,
        }

    def set_wired_limit(self, limit: int) -> int:
        assert limit <= self.recommended, "MLX refuses more"
        before = self.limits[-1] if self.limits else EARLIER
        self.limits.append(limit)
        self.evaluated.append(mx.get_active_memory())
        return before


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mac]:
    """A Mac on which every model is large."""
    pretended = Mac()
    monkeypatch.delenv(wired_memory.WIRED_SWITCH, raising=False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", pretended.device_info)
    monkeypatch.setattr(mx, "set_wired_limit", pretended.set_wired_limit)
    monkeypatch.setattr(atexit, "register", pretended.at_exit.append)
    gc.collect()  # so that no array of another test is freed while a model is loaded
    yield pretended
    wired_memory.release()


@pytest.fixture(scope="module", params=[make_llama, make_t5])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = request.param(tmp_path_factory.mktemp("model"))
    return made


def test_no_more_is_wired_than_the_weights_that_were_evaluated(mac: Mac, model: Path) -> None:
    before = mx.get_active_memory()
    loaded = load_model(model).model
    assert mac.limits == mac.evaluated
    assert loaded.nbytes <= mac.limits[-1] - before <= loaded.nbytes + ROOM


@pytest.mark.parametrize("reason", ["a small model", "the switch", "no Metal"])
def test_nothing_is_wired_for(
    reason: str, mac: Mac, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "a small model":
        mac.memory = 1 << 40
    elif reason == "the switch":
        monkeypatch.setenv("MLX_SPECDEC_WIRED", "0")
    else:
        monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    load_model(model)
    assert mac.limits == mac.at_exit == []


def test_the_earlier_limit_comes_back_once_when_the_process_ends(mac: Mac, model: Path) -> None:
    load_model(model)
    load_model(model)
    [at_exit] = mac.at_exit
    count = len(mac.limits)
    at_exit()
    at_exit()
    assert mac.limits[count:] == [EARLIER]
