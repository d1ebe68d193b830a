from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.estimate import pair
from mlx_specdec.estimate.pair import memory_limit, physical_memory
from mlx_specdec.models.outline import outline

from .. import tiny


def test_caches_grow_with_the_text() -> None:
    known = outline(tiny.CONFIGS["llama"], "llama")
    short, long = known.cache_nbytes(10, 10), known.cache_nbytes(10_000, 100)
    # Two layers of keys and values, two heads of eight numbers, in steps of 256 positions.
    per_position = 2 * 2 * 2 * 8 * 4
    assert short == 256 * per_position
    assert long in range(10_100 * per_position, (10_100 + 512) * per_position)


def test_a_control_groups_limit_counts_where_it_is_smaller(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, expected in (("max\n", total), ("12345678\n", 12345678), (str(1 << 62), total)):
        (tmp_path / "limit").write_text(text)
        assert physical_memory((tmp_path / "absent", tmp_path / "limit")) == expected
    assert physical_memory(()) == total


@pytest.mark.parametrize(
    ("info", "on_cpu", "expected"),
    [
        ({"max_recommended_working_set_size": 700, "memory_size": 1000}, False, 700),
        ({"total_memory": 1000}, False, 900),
        ({"memory_size": 1000}, False, 900),
        ({"total_memory": 1000}, True, 1800),
        ({}, True, 1800),
    ],
)
def test_the_limit_is_the_devices_own_or_a_share_of_memory(
    info: dict[str, int], on_cpu: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = mx.Device(mx.cpu if on_cpu else mx.gpu)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "default_device", lambda: device)
    monkeypatch.setattr(pair, "physical_memory", lambda: 2000)
    assert memory_limit() == expected
