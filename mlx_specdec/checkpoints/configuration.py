"""What a config.json says that cannot be, or that its weights contradict, refused in one sentence:
mlx-lm believes its configurations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .t5_keys import LARGEST

LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_ABOVE_0 = ("vocab_size", "hidden_size", "d_model", "n_embd", "num_attention_heads", "n_head")
_FROM_0 = ("intermediate_size", "num_key_value_heads", "head_dim", "num_local_experts")
_FACTORS = ("rope_theta", "rms_norm_eps")
_ENCODER = re.compile(r"(.*\.)?encoder\.block\.")
_DECODER = re.compile(r"(.*\.)?decoder\.block\.")
_LABELS = ("classification_head.", "classifier.", "qa_outputs.")
"""Heads that say a label or a place and never a word."""


def check_runs_no_code(name: object, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a model that brings its own Python file."""
    if config.get("model_file"):
        raise CheckpointError(
            f"{name} needs its own Python file ({config['model_file']!a:.80}) to run, and code "
            "from checkpoints is never run"
        )


def check_numbers(directory: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Raises CheckpointError for a size, a number of layers or a factor that cannot be.

    tensors: how many the weights have; each layer has at least one. What is no number is for mlx-lm
    to understand.
    """
    file, inner = directory / "config.json", config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for name in (*_ABOVE_0, *_FROM_0, *LAYERS):
            value, least = part.get(name), 1 if name in _ABOVE_0 else 0
            whole = type(value) is int and least <= value <= LARGEST
            if isinstance(value, int | float) and not whole:
                raise CheckpointError(
                    f"{file} has {name} {_short(value)}: need a whole number from {least} to "
                    f"{LARGEST}"
                )
            if name in LAYERS and isinstance(value, int) and value > tensors:
                raise CheckpointError(
                    f"{file} asks for {value} layers, and there are {tensors} tensors"
                )
        for name in _FACTORS:
            said: Any = part.get(name)
            for factor in said if isinstance(said, list) and said else [said]:
                if factor is not None and not (
                    type(factor) in (int, float) and 0 < factor < math.inf
                ):
                    raise CheckpointError(
                        f"{file} has {name} {_short(said)}: need a number above 0"
                    )


def check_weights(
    expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError for the first tensor missing, left over, or of another shape."""
    extra = "is not part of the model that config.json describes"
    for problem, names in (
        ("is missing", sorted(expected.keys() - given.keys())),
        (extra, sorted(given.keys() - expected.keys())),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"weight {names[0]} {problem}{more}: download the model again")
    for name in sorted(expected):
        if expected[name] != given[name]:
            raise CheckpointError(
                f"weight {name} has shape {given[name]} where config.json asks for {expected[name]}"
            )


def check_generates(directory: Path, config: Mapping[str, Any], stored: Iterable[str]) -> None:
    """Raises CheckpointError for a T5 that has no decoder, or a head for something else than text.

    stored: names of all tensors. The architecture that config.json names is only told, since copied
    configurations name the wrong one.
    """
    names, listed = list(stored), config.get("architectures")
    shown = f" ({str(listed[0])[:80]})" if isinstance(listed, list) and listed else ""
    if any(name.startswith(_LABELS) for name in names):
        raise CheckpointError(
            f"{directory} holds a model that gives labels{shown}, not text: take one that is a "
            "ForConditionalGeneration"
        )
    if any(map(_ENCODER.match, names)) and not any(map(_DECODER.match, names)):
        raise CheckpointError(
            f"{directory} holds an encoder alone{shown}, which cannot generate text: take "
            "the whole model"
        )


def _short(value: Any) -> str:
    # A number of thousands of digits is none that Python writes out.
    if type(value) is int and abs(value) > 10**40:
        return "of more than 40 digits"
    return f"{value!a:.40}"
