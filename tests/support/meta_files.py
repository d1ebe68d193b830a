"""Meta's directories, taken from the fixtures and changed."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_specdec.checkpoints.formats.torch import TorchFile
from mlx_specdec.models.loading import load_model

from .torch_files import save_torch

FIXTURES = Path(__file__).parents[1] / "fixtures"
META = FIXTURES / "meta"
CLOSE = 1e-4
"""How far log-probabilities in float32 may be from the reference's in float64."""

Change = Callable[[dict[str, mx.array]], Any]


def copy_meta(name: str, root: Path, params: Mapping[str, Any] | None = None) -> Path:
    """A fixture with the tokenizer beside it; params: what else params.json says, None to leave
    out."""
    shutil.copytree(META / name, root / name, ignore=shutil.ignore_patterns("*.npz"))
    if not (root / name / "tokenizer.model").is_file():
        shutil.copy(META / "tokenizer.model", root)
    file = root / name / "params.json"
    changed = {**json.loads(file.read_text(encoding="utf-8")), **(params or {})}
    written = {key: value for key, value in changed.items() if value is not None}
    file.write_text(json.dumps(written), encoding="utf-8")
    return root / name


def read_part(file: Path) -> dict[str, mx.array]:
    """All tensors of one part."""
    part = TorchFile(file)
    return {name: part.rows(name, 0, info.extent) for name, info in part.infos.items()}


def change_part(file: Path, change: Change) -> None:
    """Write one part anew with its tensors changed."""
    weights = read_part(file)
    change(weights)
    save_torch(file, weights)


def distance(directory: Path, expected: Path) -> float:
    """Largest difference of log-probabilities from a reference's."""
    reference = np.load(expected)
    context = load_model(directory, dtype="float32").model.open([0])
    rows = context.advance(mx.array(reference["tokens"])[None]).logits[0]
    log_p = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    assert log_p.shape == reference["log_p"].shape
    return float(mx.max(mx.abs(log_p - mx.array(reference["log_p"]))).item())
