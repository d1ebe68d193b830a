"""A directory -> a Model ready to run, converted on the way where that is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoints import files
from ..errors import OptionError
from ..text.tokenizer import Kind
from . import families
from .base import Base
from .cache_settings import CacheSettings
from .number_format import NumberFormat


@dataclass(frozen=True)
class Loaded:
    """A model with what its files say besides weights.

    dtype: in words, for example "float32". task_prefix: what every prompt has to begin with. note:
    a line for the user on how its weights are computed with; mostly "".
    """

    model: Base
    eos_token_ids: tuple[int, ...]
    kind: Kind
    dtype: str
    task_prefix: str = ""
    note: str = ""


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
    """Load a checkpoint in Hugging Face's or mlx-lm's layout.

    dtype, q_bits, q_group_size, expand: see `NumberFormat`. caches: for decoder-only models, as is
    adapter, a directory that mlx-lm wrote. group: of ranks that share the model, by its layers as a
    pipeline; this one keeps its part. Raises CheckpointError for damaged or unsupported files,
    OptionError for settings that do not suit them, and for models that cannot be shared.
    """
    numbers = NumberFormat(dtype, q_bits, q_group_size, expand)
    config = files.read_config(directory)
    family = families.of_config(config)
    if mx.metal.is_available():
        # As mlx-lm has it: what the GPU works on is not to be swapped out between two passes.
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    if group is not None and adapter is not None:
        raise OptionError("ranks cannot share an adapter: fuse it with its model, by mlx_lm.fuse")
    if pipeline and family.kind == "encoder-decoder":
        raise OptionError("a T5 model cannot be a pipeline: take distributed tensor")
    how: dict[str, Any] = {"pipeline": True} if pipeline else {}
    model, eos_token_ids, words = family.load(
        directory, config, numbers, caches, adapter, group, **how
    )
    note = numbers.choice(directory.name, model.network, "quantization" in config)
    return Loaded(model, eos_token_ids, family.kind, words, task_prefix(config), note)


def task_prefix(config: Mapping[str, Any]) -> str:
    """The one prefix in the `task_specific_params` of a config.json, where T5 keeps those of its
    tasks; empty where there is none, or a choice."""
    tasks = config.get("task_specific_params")
    settings = tasks.values() if isinstance(tasks, Mapping) else ()
    prefixes = [one.get("prefix") for one in settings if isinstance(one, Mapping)]
    known = {prefix for prefix in prefixes if isinstance(prefix, str) and prefix.strip()}
    return known.pop() if len(known) == 1 else ""
