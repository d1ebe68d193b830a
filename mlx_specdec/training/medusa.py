"""train-medusa from beginning to end: a model and a file of texts -> a directory of heads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx

from ..assemble import Pair
from ..checkpoints.disk import destination
from ..checkpoints.formats.medusa import BASE, COUNT, LAYERS, SAFETENSORS
from ..errors import OptionError
from ..models.medusa_heads import MedusaHeads
from .config import DataConfig, HeadsConfig
from .head_task import HeadTask, initial_heads
from .run import Trained, Training, Watcher, work_directory


def train(
    pair: Pair,
    file: Path,
    output: Path,
    data: DataConfig,
    config: HeadsConfig,
    watcher: Watcher,
) -> Trained:
    """Train heads for `pair`'s target and write them as a directory that loads with it.

    pair: as assemble.load gives it. Raises PromptError for data with nothing usable, OptionError
    for a model that is heads, OutputError where `output` exists or cannot be written.
    """
    with work_directory(output) as directory:
        if pair.heads is not None:
            raise OptionError(
                f"{pair.name} is Medusa heads already: give the base model that they name"
            )
        training = Training(pair, file, directory, data, watcher)
        heads = initial_heads(
            pair.target, config.heads, config.layers, own_output=config.own_output
        )
        task = HeadTask(heads, training.rows, config)
        outcome = training.fit(task, config)
        with destination.directory(output) as made:
            write(made, heads, _base_name(pair.name, output))
    return training.trained(output, task, outcome)


def write(directory: Path, heads: MedusaHeads, base: str) -> None:
    """config.json and the heads in bfloat16, in the layout that text-generation-inference loads."""
    tensors = {name: array.astype(mx.bfloat16) for name, array in heads.tensors().items()}
    shapes = next(iter(tensors.values())).shape
    config = {
        BASE: base,
        COUNT: heads.count,
        LAYERS: len(heads.weights),
        "hidden_size": shapes[-1],
        "vocab_size": heads.vocabulary,
    }
    mx.save_safetensors(str(directory / SAFETENSORS), tensors, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _base_name(name: str, output: Path) -> str:
    """What config.json calls the base: a Hub name as it is, a directory seen from `output`."""
    path = os.path.expanduser(name)
    return os.path.relpath(path, output) if os.path.isdir(path) else name
