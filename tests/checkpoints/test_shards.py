from __future__ import annotations

from pathlib import Path

import pytest

from mlx_specdec.checkpoints.shards import format_of


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00002.bin",
        "some.gguf",
    ],
)
def test_weights_count_as_here_even_where_some_are_missing(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not format_of(tmp_path)
    (tmp_path / name).write_bytes(b"")
    assert format_of(tmp_path)
