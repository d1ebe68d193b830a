"""Adapters that mlx-lm has trained (LoRA, DoRA, or whole layers), put onto a decoder-only model.

mlx-lm does it; what it takes on trust is looked at first. Imports mlx-lm and with it transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import load_adapters

from ..checkpoints.disk.reading import read_json
from ..checkpoints.formats import safetensors
from ..errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


def adapt(model: nn.Module, adapter: Path) -> dict[str, Any]:
    """Put an adapter onto a model, lazily, and return its configuration.

    adapter: the directory that mlx-lm wrote. Raises CheckpointError where it is none, is damaged,
    or belongs to another model.
    """
    for name in (CONFIG, WEIGHTS):
        if not (adapter / name).is_file():
            raise CheckpointError(
                f"{adapter} is no adapter of mlx-lm: it has no {name}{_other_programs(adapter)}"
            )
    told = read_json(adapter / CONFIG)
    if told.get("fine_tune_type", "lora") != "full":
        missing = [name for name in ("num_layers", "lora_parameters") if name not in told]
        if missing:
            raise CheckpointError(f"{adapter / CONFIG} has no {missing[0]}: mlx-lm writes one")
    safetensors.read_header(adapter / WEIGHTS)
    try:
        load_adapters(model, str(adapter))
    except Exception as problem:  # mlx-lm checks little: whatever fails first tells
        said = " ".join(str(problem).split())
        raise CheckpointError(
            f"{adapter} does not fit the model ({type(problem).__name__}: {said:.200}): name the "
            "model that it was trained on"
        ) from problem
    model.eval()  # New layers drop values at random until they are told not to.
    return told


def _other_programs(adapter: Path) -> str:
    if (adapter / "adapter_model.safetensors").is_file():
        return " (it is an adapter of PEFT: merge it into its model there, and convert the result)"
    return ""
