"""Conversions through the public face, and what they leave on the disk."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import SpecdecError, convert

from ..support.checkpoints import listing

SMALL: dict[str, Any] = {"quantize": 4, "q_group_size": 32}
"""Options that quantize models whose rows have 32 weights."""


def tensors(directory: Path) -> dict[str, mx.array]:
    """Return all tensors of the model's safetensors files."""
    found: dict[str, mx.array] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        arrays = mx.load(str(file))
        assert isinstance(arrays, dict) and not found.keys() & arrays.keys()
        found |= arrays
    return found


def same(first: dict[str, mx.array], second: dict[str, mx.array]) -> bool:
    """Return whether two models have the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(
        array.dtype == second[name].dtype and mx.array_equal(array, second[name]).item()
        for name, array in first.items()
    )


def config_of(directory: Path) -> dict[str, Any]:
    """Return config.json."""
    return json.loads((directory / "config.json").read_text())


def change_config(directory: Path, **changes: Any) -> Path:
    """Change entries of config.json. A value of None removes an entry."""
    config = {**config_of(directory), **changes}
    kept = {name: value for name, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    return directory


def provenance(directory: Path) -> dict[str, Any]:
    """Return provenance.json."""
    return json.loads((directory / "provenance.json").read_text(encoding="utf-8"))


def refused(kind: type[SpecdecError], source: Path | str, **options: Any) -> str:
    """Return the one line with which a conversion fails, after which no file is new."""
    root = Path(source).parent
    before = listing(root)
    with pytest.raises(kind) as caught:
        convert(str(source), root / "deep" / "out", **options)
    assert listing(root) == before and "\n" not in str(caught.value)
    return str(caught.value)


def dequantized(arrays: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """Return the same tensors with quantized matrices as float32, as config.json says."""
    entry, whole = config["quantization"], dict(arrays)
    for name in [name for name in arrays if name.endswith(".scales")]:
        path = name.removesuffix(".scales")
        how = entry.get(path, entry)
        scales, biases = whole.pop(name), whole.pop(f"{path}.biases", None)
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        values = mx.dequantize(
            arrays[f"{path}.weight"],
            scales,
            biases,
            group_size=how["group_size"],
            bits=how["bits"],
            mode=how.get("mode", "affine"),
        )
        whole[f"{path}.weight"] = values.astype(mx.float32)
    return whole
