"""A directory or a config.json -> a model to run, to outline or to train, by its family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints import files, shards
from ..checkpoints.disk import show
from ..errors import OptionError
from ..text.tokenizer import Kind
from . import families, number_format
from .base import Base
from .cache_settings import CacheSettings
from .number_format import NumberFormat, dequantize, twin_of
from .outline import Outline
from .trainable import Trainable

GROWTH_TO_NOTE = 2.5
"""A note says what a GGUF model takes in memory if that is this many times its files. On a CPU half
precision takes twice as much, and K types take at least four times as much."""


@dataclass(frozen=True)
class Loaded:
    """A model, and what its files have besides weights. dtype: in words, for example "float32".
    task_prefix: what every prompt has to begin with. note: a line for the user on how its weights
    are computed with; mostly "". sampling: see files.sampling_settings."""

    model: Base
    eos_token_ids: tuple[int, ...]
    kind: Kind
    dtype: str
    task_prefix: str = ""
    note: str = ""
    sampling: Mapping[str, object] = field(default_factory=dict)


def load_model(
    directory: Path,
    *,
    dtype: str = "auto",
    q_bits: int | None = None,
    q_group_size: int = 64,
    expand: bool | None = None,
    caches: CacheSettings | None = None,
    adapter: Path | None = None,
    group: mx.distributed.Group | None = None,
    pipeline: bool = False,
) -> Loaded:
    """Load a checkpoint in Hugging Face's or mlx-lm's layout. dtype, q_bits, q_group_size, expand:
    see `NumberFormat`. caches, adapter (a directory that mlx-lm wrote): for decoder-only models.
    group: of ranks that share the model; this one keeps its part of every layer, or as a pipeline
    some layers. Raises CheckpointError for damaged or unsupported files, OptionError for settings
    that do not suit them, and for models that cannot be shared."""
    numbers = NumberFormat(dtype, q_bits, q_group_size, expand)
    config = files.read_config(directory)
    family = families.of_config(config)
    if group is not None and adapter is not None:
        raise OptionError("ranks cannot share an adapter: fuse it with its model, by mlx_lm.fuse")
    model, eos_token_ids, words = family.load(
        directory, config, numbers, caches, adapter, group, pipeline=pipeline
    )
    note = numbers.choice(directory.name, model.network, "quantization" in config)
    note = note or _growth(directory, model.network)
    note = "; ".join(filter(None, (note, getattr(model.network, "note", ""))))
    sampling = files.sampling_settings(directory)
    return Loaded(model, eos_token_ids, family.kind, words, task_prefix(config), note, sampling)


def _growth(directory: Path, network: nn.Module) -> str:
    """Return a line on a large GGUF model that takes much more memory than its files, or ""."""
    if shards.format_of(directory) != "gguf":
        return ""
    parts = shards.parts_of(shards.find(directory).files[0])
    stored, needed = sum(part.stat().st_size for part in parts), number_format.nbytes(network)
    if needed < max(number_format.NOTED_ABOVE, GROWTH_TO_NOTE * stored):
        return ""
    return (
        f"{directory.name}: its {show(stored)} become {show(needed)} in memory, because MLX lacks "
        "its quantized types; mlx-specdec convert --quantize writes a model that stays small"
    )


def task_prefix(config: Mapping[str, Any]) -> str:
    """Return the one prefix in the `task_specific_params` of a T5's config.json, "" where there is
    none, or several."""
    tasks = config.get("task_specific_params")
    settings = tasks.values() if isinstance(tasks, Mapping) else ()
    prefixes = [one.get("prefix") for one in settings if isinstance(one, Mapping)]
    known = {prefix for prefix in prefixes if isinstance(prefix, str) and prefix.strip()}
    return known.pop() if len(known) == 1 else ""


def trainable(model: Base) -> Trainable:
    """Return a copy of a model to train. Raises OptionError where its layers cannot be dequantized,
    or have no gradient."""
    network = twin_of(model.network)
    dequantize(network)
    trained = families.of_model(model).trainable(network)
    inputs = trained.inputs([[1, 2], [1]], [[2, 1], [1]])
    try:
        mx.eval(nn.value_and_grad(network, lambda *given: trained.logits(*given).sum())(*inputs))
    except (ValueError, RuntimeError, AttributeError) as problem:
        kind = type(network).__module__.rpartition(".")[2]
        raise OptionError(
            f"drafts of type {kind} cannot be trained: take another kind"
        ) from problem
    return trained


def outline(
    config: Mapping[str, Any],
    name: str,
    *,
    dtype: str = "auto",
    q_bits: int | None = None,
    q_group_size: int = 64,
    expand: bool | None = None,
    depth: int | None = None,
) -> Outline:
    """Return the outline of the model that a configuration describes.

    Args:
        config: What config.json says.
        name: What messages call the model.
        dtype, q_bits, q_group_size, expand: See `NumberFormat`.
        depth: The number of layers to keep; an encoder then has one, since no step runs it. If
            `expand` is None, the weights that are left decide whether they are dequantized.

    Raises:
        OptionError: The settings do not suit the model.
        CheckpointError: The configuration describes no supported model.
    """
    numbers = NumberFormat(dtype, q_bits, q_group_size, expand)
    return families.of_config(config).outline(config, name, numbers, depth)
