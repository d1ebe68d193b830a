from __future__ import annotations

from pathlib import Path

import pytest

from mlx_specdec.checkpoints import shards
from mlx_specdec.checkpoints.hub import choose
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


@pytest.mark.parametrize(
    ("names", "format", "wanted"),
    [
        ("pytorch_model.bin model.fp16.safetensors", "torch", "pytorch_model.bin"),
        ("model.fp16.safetensors consolidated.00.pth", "safetensors", "model.fp16.safetensors"),
        ("a.gguf consolidated.00.pth", "meta", "consolidated.00.pth"),
        ("pytorch_model.bin model.safetensors a.gguf", "safetensors", "model.safetensors"),
    ],
)
def test_what_is_fetched_is_what_is_read(
    names: str, format: str, wanted: str, tmp_path: Path
) -> None:
    for name in names.split():
        (tmp_path / name).write_bytes(b"")
    here = shards.find(tmp_path)
    assert (here.format, [file.name for file in here.files]) == (format, [wanted])
    assert choose("some/model", names.split()).weights == (wanted,)
    assert format_of(tmp_path) == format
