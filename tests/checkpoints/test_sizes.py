from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.checkpoints import disk as sizes
from mlx_specdec.errors import OptionError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1000", 1000),
        ("4GB", 4 * 10**9),
        ("4gb", 4 * 10**9),
        ("4g", 4 * 10**9),
        ("2 GiB", 2 * 2**30),
        ("1.5MB", 1_500_000),
        (" 7 k ", 7000),
        ("1B", 1),
        ("1TB", 10**12),
    ],
)
def test_a_size_in_words_is_understood(text: str, nbytes: int) -> None:
    assert sizes.parse(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "4XB", "4 G B", "1e9", "4iB", "9" * 40, "4\nGB\n4"]
)
def test_what_is_no_size_is_one_sentence(text: str) -> None:
    with pytest.raises(OptionError, match="is no size") as caught:
        sizes.parse(text)
    assert "\n" not in str(caught.value)


def test_sizes_are_shown_in_readable_units() -> None:
    shown = [sizes.show(n) for n in (0, 999, 1000, 45_300_000_000, 3 * 10**12)]
    assert shown == ["0 bytes", "999 bytes", "1.0 kB", "45.3 GB", "3.0 TB"]


def test_a_small_machine_gets_smaller_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(os, "sysconf", lambda name: 65536)
    assert sizes.default_shard_bytes() == 2**30
    monkeypatch.setattr(os, "sysconf", lambda name: 2**20)
    assert sizes.default_shard_bytes() == 4_000_000_000


def test_metal_knows_the_memory_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"memory_size": 2**35})
    assert sizes.memory() == 2**35


@pytest.mark.parametrize(
    ("known", "memory"),
    [({"SC_PAGESIZE": 2**14, "SC_PHYS_PAGES": 2**20}, 2**34), ({}, sizes.ASSUMED_MEMORY)],
)
def test_a_python_that_does_not_know_every_name_is_no_obstacle(
    known: dict[str, int], memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sysconf(name: str) -> int:
        if name not in known:
            raise ValueError("unrecognized configuration name")
        return known[name]

    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(os, "sysconf", sysconf)
    assert sizes.memory() == memory


def test_a_control_groups_limit_counts_where_it_is_smaller(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, expected in (("max\n", total), ("12345678\n", 12345678), (str(1 << 62), total)):
        (tmp_path / "limit").write_text(text)
        assert sizes.memory((tmp_path / "absent", tmp_path / "limit")) == expected
    assert sizes.memory(()) == total


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
    monkeypatch.setattr(sizes, "memory", lambda: 2000)
    assert sizes.usable_memory() == expected
