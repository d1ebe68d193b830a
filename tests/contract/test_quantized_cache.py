"""A KV cache with quantized values, for heads of any size."""

from pathlib import Path

import pytest

from mlx_specdec import CacheSettings, Options, generate, load

from .support import checkpoint, command

PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose heads have 96, 128 and 80 values."""
    home = tmp_path_factory.mktemp("heads")
    for size in (80, 96, 128):
        checkpoint(home / str(size), head_dim=size)
    return home


@pytest.mark.parametrize("group", [None, 64, 128])
def test_a_group_size_that_fits_is_named(home: Path, group: int | None) -> None:
    flags = ("--model", home / "96", "-m", 4, "--kv-bits", 8)
    if group is not None:
        flags += ("--kv-group-size", group)
    parts = f"groups of {group or 64} values", "heads of this llama model have 96", "size 32"
    others = [("serve", "--port", 0), ("chat",)] if group is None else []
    for arguments in [("generate", PROMPT), *others]:
        command(*arguments, *flags).refuses("kv-bits", *parts)


def test_heads_that_no_group_divides_take_no_quantized_cache(home: Path) -> None:
    flags = ("--model", home / "80", "-m", 4, "--kv-bits", 8)
    command("generate", PROMPT, *flags).refuses("have 80", "leave kv-bits out")


@pytest.mark.parametrize("heads, group", [("96", 32), ("128", 32), ("128", 64), ("128", 128)])
def test_the_named_size_works(home: Path, heads: str, group: int) -> None:
    pair = load(home / heads, caches=CacheSettings(bits=8, group_size=group))
    assert len(generate(pair, PROMPT, Options(max_tokens=4)).tokens) == 4
