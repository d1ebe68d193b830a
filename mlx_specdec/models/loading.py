"""Families of models, which load models from directories and prepare them for training. A family
is imported when it is first needed, so that T5 models do not import mlx-lm. A new encoder-decoder
family is a module with an object `family`, of the class
`encoder_decoder.family.EncoderDecoderFamily`, and a line in ENCODER_DECODERS. mlx-lm provides the
decoder-only models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints import files
from ..checkpoints.formats.gguf import GgufFile
from ..errors import CheckpointError, OptionError
from ..text.tokenizer import Tokenizer
from .base import Base, LoadSettings, Trainable, family_of
from .cache_settings import OWN_CACHES, CacheSettings
from .encoder_decoder.family import Languages
from .number_format import NumberFormat, dequantized

Config = Mapping[str, Any]
ENCODER_DECODERS = {
    **dict.fromkeys(("t5", "mt5", "umt5"), "t5"),
    "t5gemma2": "t5gemma2",
    **dict.fromkeys(("bart", "mbart", "marian", "m2m_100", "pegasus"), "bart"),
}
"""The module of the family for each model_type of config.json."""


class Family(Protocol):
    """A family of models, which is a module or an object."""

    def load(
        self, directory: Path, config: Config, how: LoadSettings
    ) -> tuple[Base, tuple[int, ...], str]:
        """Return the model, the tokens that end a completion (maybe none), and the dtype in words,
        such as "bfloat16" or "4-bit, bfloat16". See `load_model`."""

    def trainable(self, network: Any) -> Trainable:
        """Return the training interface of a network whose weights are float32."""

    def with_layers(self, config: Config, chosen: Sequence[int]) -> dict[str, Any]:
        """Return the configuration of a model that has only the `chosen` decoder layers. Raises
        CheckpointError if config.json does not say how many layers there are."""

    def empty(self, config: Config, like: Any) -> Base:
        """Return a model of a configuration with arbitrary weights. Facts that config.json lacks
        come from `like`, a network of the family. Raises OptionError if this is impossible."""

    def languages(self, network: Any, tokenizer: Tokenizer) -> Languages | None:
        """Return the languages of a translation model, or None if it names none."""


def is_encoder_decoder(config: Config) -> bool:
    return str(config.get("model_type")) in ENCODER_DECODERS


def family_of_config(config: Config) -> Family:
    if is_encoder_decoder(config):
        module = import_module(f".{ENCODER_DECODERS[str(config['model_type'])]}", __package__)
        return cast(Family, module.family)
    from .mlx_lm import family as decoder_family

    return decoder_family


def family_of_network(network: nn.Module) -> Family:
    return family_of_config({"model_type": getattr(network, "model_type", None)})


@dataclass(frozen=True)
class Loaded:
    """A loaded model, and the facts of its files that are not weights.

    Attributes:
        eos_token_ids: The tokens that end a completion.
        dtype: The dtype in words, such as "4-bit, bfloat16".
        task_prefix: The beginning that every prompt needs, or "".
        note: A line for the user on the dtype of the weights; mostly "".
        sampling: See `files.sampling_settings`.
    """

    model: Base
    eos_token_ids: tuple[int, ...]
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
    """Load a checkpoint in Hugging Face's or mlx-lm's layout.

    Args:
        dtype, q_bits, q_group_size, expand: See `NumberFormat`.
        caches: The settings of the KV cache, for decoder-only models.
        adapter: A directory with an adapter that mlx-lm wrote, for decoder-only models.
        group: The ranks that share the model. This rank loads its part of every layer.
        pipeline: This rank loads some of the layers instead.
    Raises:
        CheckpointError: If files are damaged or not supported.
        OptionError: If settings do not suit the model, or ranks cannot share it.
    """
    numbers = NumberFormat(dtype, q_bits, q_group_size, expand)
    how = LoadSettings(numbers, caches or OWN_CACHES, adapter, group, pipeline)
    config = files.read_config(directory)
    family = family_of_config(config)
    if group is not None and adapter is not None:
        raise OptionError("ranks cannot share an adapter: fuse it with its model, by mlx_lm.fuse")
    model, eos_token_ids, words = family.load(directory, config, how)
    note = numbers.choice(directory.name, model.network, "quantization" in config)
    note = "; ".join(filter(None, (note, model.network.note)))
    sampling = files.sampling_settings(directory)
    return Loaded(model, eos_token_ids, words, task_prefix(config), note, sampling)


def why_not(source: Path) -> str:
    """Return why the model in a directory or a GGUF file cannot be loaded, as far as its headers
    and its type say, or "" if it can."""
    try:
        if source.is_file():
            GgufFile(source)
        else:
            config = files.read_config(source)
            if not is_encoder_decoder(config):
                from .mlx_lm.loader import classes

                classes(config)
    except CheckpointError as problem:
        return str(problem).replace(f"{source} ", "")
    return ""


def task_prefix(config: Mapping[str, Any]) -> str:
    """Return the prefix in the `task_specific_params` of a T5's config.json, or "" if there is none
    or more than one."""
    tasks = config.get("task_specific_params")
    settings = tasks.values() if isinstance(tasks, Mapping) else ()
    entries = [task.get("prefix") for task in settings if isinstance(task, Mapping)]
    prefixes = {prefix for prefix in entries if isinstance(prefix, str) and prefix.strip()}
    return prefixes.pop() if len(prefixes) == 1 else ""


def trainable(model: Base) -> Trainable:
    """Return a copy of a model that can be trained. Raises OptionError if layers have no
    gradient."""
    network = dequantized(model.network)
    trained = family_of_network(model.network).trainable(network)
    inputs = trained.inputs([[1, 2], [1]], [[2, 1], [1]])
    try:
        mx.eval(nn.value_and_grad(network, lambda *arrays: trained.logits(*arrays).sum())(*inputs))
    except (ValueError, RuntimeError, AttributeError) as problem:
        message = f"drafts of type {family_of(network)} cannot be trained: take another kind"
        raise OptionError(message) from problem
    return trained
