from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mlx_specdec.measure.passes import parts, pattern
from mlx_specdec.models.loading import outline

from ..support import tiny

MIB = 1 << 20


@dataclass
class Layers:
    """An outline of which only the layers matter."""

    layers: str
    layer_mib: int
    nbytes: int = 2 << 30
    layer_nbytes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.layer_nbytes = [self.layer_mib * MIB] * len(self.layers)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("aaaaaaaa", (0, 1)),
        ("baaaaaaa", (1, 1)),
        ("abababab", (0, 2)),
        ("sssssg" * 4 + "ss", (0, 6)),
        ("sssssgsssssgssssss", (12, 1)),
        ("dddabababab", (3, 2)),
        ("abcdefgh", (0, 8)),
    ],
)
def test_the_pattern_of_layers_is_found(layers: str, expected: tuple[int, int]) -> None:
    assert pattern(layers) == expected


def test_parts_are_too_large_for_a_processors_cache_and_hold_whole_patterns() -> None:
    # 128 MiB need five layers of 30, and 256 MiB more another nine.
    assert parts(Layers("a" * 32, 30)) == (5, 14)
    assert parts(Layers("a" * 8, 900)) == (1, 3)
    assert parts(Layers("b" + "a" * 31, 30)) == (6, 15)
    few, more = parts(Layers("sssssg" * 8, 30)) or (0, 0)
    assert (few, more) == (6, 18)


def test_layers_of_real_families_are_distinguished() -> None:
    def found(family: str, **changes: object) -> tuple[int, int]:
        return pattern(outline({**tiny.CONFIGS[family], **changes}, family).layers)

    assert found("llama", num_hidden_layers=6) == (0, 1)
    assert found("gemma3", num_hidden_layers=6) == (0, 2)
    assert found("deepseek_v3", num_hidden_layers=6) == (1, 1)
    assert found("qwen3_next", num_hidden_layers=6) == (0, 2)
