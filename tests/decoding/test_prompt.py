"""How much of a prompt goes through one pass."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_specdec.decoding.prompt import CHUNK, LARGE_CHUNK, ROOM, chunk


@pytest.mark.parametrize(
    ("device", "info", "prompts", "expected"),
    [
        (mx.cpu, {"memory_size": 100 * ROOM}, 1, CHUNK),
        (mx.gpu, {"memory_size": 4 * ROOM}, 1, LARGE_CHUNK),
        (mx.gpu, {"memory_size": 4 * ROOM}, 3, LARGE_CHUNK),
        (mx.gpu, {"memory_size": 4 * ROOM}, 4, CHUNK),
        (mx.gpu, {"memory_size": ROOM + ROOM // 2}, 1, CHUNK),
        (mx.gpu, {}, 1, CHUNK),
    ],
)
def test_large_steps_are_for_accelerators_with_room(
    device: mx.DeviceType,
    info: dict[str, int],
    prompts: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: ROOM * 3 // 4)
    assert chunk(prompts) == expected
