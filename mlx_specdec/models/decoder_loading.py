"""A directory that mlx-lm can read -> a decoder-only model.

Knows mlx-lm's loader, hands it the weights, and turns what it raises into sentences that name the
first wrong one. Imports mlx-lm and with it transformers (about a second).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, dequantize_model, load_model

from ..cache_settings import CacheSettings
from ..checkpoints import files
from ..checkpoints.formats import safetensors as safetensors_file
from ..checkpoints.plausible import check_numbers
from ..errors import CheckpointError, OptionError, SpecdecError
from .decoder_only import DecoderOnlyModel
from .number_format import expands, on_cpu


def load_decoder_only(
    directory: Path,
    config: Mapping[str, Any],
    *,
    dtype: str = "auto",
    q_bits: int | None = None,
    q_group_size: int = 64,
    caches: CacheSettings | None = None,
) -> tuple[DecoderOnlyModel, tuple[int, ...], str]:
    """Loads a directory that mlx-lm can read, or one that has torch's archives in the place of
    model*.safetensors.

    config: the contents of config.json. dtype: float32, float16, bfloat16, or auto: float32 where
    a model runs on the CPU, unless it is quantised and large; otherwise as stored.
    q_bits: quantise the weights after loading, in groups of q_group_size, the layers that mlx-lm's
    converter would quantise. caches: kinds of KV caches to use in place of the model's own.

    Returns the model, the ids that end a text (maybe none) and the kind of weights in words, such
    as "bfloat16" or "4-bit, bfloat16". Raises CheckpointError for files that are damaged,
    incomplete or of an unsupported kind, OptionError for settings that do not suit the model.
    """
    model = in_asked_numbers(_read(directory, config), str(directory), dtype, q_bits, q_group_size)
    mx.eval(model.parameters())
    try:
        runnable = DecoderOnlyModel(model, max_length(config), caches)
    except (SpecdecError, RuntimeError, MemoryError, OSError):
        raise
    except Exception as error:  # building one pass shows what config.json has that nobody can run
        raise CheckpointError(f"{directory} cannot be run: {_first_line(error):.200}") from error
    return runnable, _eos(directory, config), in_words(model)


def in_asked_numbers(
    model: nn.Module, name: str, dtype: str, q_bits: int | None, q_group_size: int
) -> nn.Module:
    """The model, or another one of the same weights, cast and quantised as asked for, lazily.

    Arguments as of `load_decoder_only`; name: for messages. Raises OptionError.
    """
    quantised = _is_quantised(model)
    if quantised and dtype == "auto" and q_bits is None and expands(_count(model)):
        model = dequantize_model(model)
    if dtype != "auto" or (on_cpu() and not _is_quantised(model)):
        cast(model, mx.float32 if dtype == "auto" else getattr(mx, dtype))
    if q_bits is not None:
        if quantised:
            raise OptionError(f"{name} is quantised already: leave the number of bits out")
        _quantise(model, q_bits, q_group_size)
    return model


def _read(directory: Path, config: Mapping[str, Any]) -> nn.Module:
    """The model with its weights not computed yet, so that what fails later is no file's fault."""
    if config.get("model_file"):
        raise CheckpointError(
            f"{directory} needs its own Python file ({config['model_file']!a:.80}) to run, and "
            "code from checkpoints is never run"
        )
    given = dict(files.tensors(directory))
    check_numbers(directory, config, len(given))
    for file in directory.glob("model*.safetensors"):  # mlx-lm opens all, asked to or not
        safetensors_file.read_header(file)
    try:
        # Some of mlx-lm's models print remarks; standard output is for text alone.
        with contextlib.redirect_stdout(sys.stderr):
            model, _ = load_model(
                directory,
                lazy=True,
                strict=False,
                get_model_classes=lambda config: _checked_classes(config, given),
            )
    except (CheckpointError, RuntimeError, MemoryError, OSError):
        raise
    except Exception as error:  # mlx-lm's classes check nothing: whatever fails first tells
        raise CheckpointError(f"{directory} cannot be loaded: {_first_line(error):.200}") from error
    model.__class__ = type(model).__mro__[1]
    return model


def _checked_classes(
    config: dict[str, Any], given: dict[str, mx.array]
) -> tuple[type[nn.Module], Any]:
    """mlx-lm's classes for a config, the model's with checks that name the first wrong key.

    given: what it loads, in the place of the files that mlx-lm itself would look for.

    Raises CheckpointError for a model_type that mlx-lm does not have.
    """
    plain, arguments = classes(config)

    def load_weights(self: Any, weights: list[tuple[str, mx.array]], strict: bool = True) -> Any:
        _check_weights(dict(tree_flatten(self.parameters())), dict(weights))
        return plain.load_weights(self, weights, strict)

    body: dict[str, Any] = {"load_weights": load_weights}
    own = getattr(plain, "sanitize", lambda self, weights: weights)

    def sanitize(self: Any, weights: dict[str, mx.array]) -> Any:
        try:
            return own(self, given)
        except KeyError as error:
            raise CheckpointError(f"weight {error.args[0]} is missing") from error

    body["sanitize"] = sanitize
    return type(plain.__name__, (plain,), body), arguments


def classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], Any]:
    """mlx-lm's classes of a model and its arguments.

    Raises CheckpointError for a model_type that mlx-lm does not have.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError("config.json has no model_type: it does not describe a model")
    try:
        return _get_classes(dict(config))
    except ValueError as error:
        raise CheckpointError(
            f"model_type {kind!a:.60} is not supported by the installed mlx-lm"
        ) from error


def _check_weights(expected: Mapping[str, mx.array], given: Mapping[str, mx.array]) -> None:
    for problem, names in (
        ("is missing", sorted(expected.keys() - given.keys())),
        (
            "is not part of the model that config.json describes",
            sorted(given.keys() - expected.keys()),
        ),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"weight {names[0]} {problem}{more}: download the model again")
    for name in sorted(expected):
        if expected[name].shape != given[name].shape:
            raise CheckpointError(
                f"weight {name} has shape {given[name].shape} where config.json asks for "
                f"{expected[name].shape}"
            )


def _is_quantised(model: nn.Module) -> bool:
    return any(hasattr(module, "bits") for module in model.modules())


def _count(model: nn.Module) -> int:
    """How many weights there are, packed ones included."""
    packed = {id(m.weight): 32 // m.bits for m in model.modules() if hasattr(m, "bits")}
    arrays = (array for _, array in tree_flatten(model.parameters()))
    return sum(array.size * packed.get(id(array), 1) for array in arrays)


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """All floating weights to `dtype`, but those that a model wants kept in float32; lazily."""
    may = getattr(model, "cast_predicate", lambda _: True)

    def change(path: str, array: mx.array) -> mx.array:
        return (
            array.astype(dtype) if may(path) and mx.issubdtype(array.dtype, mx.floating) else array
        )

    model.update(tree_map_with_path(change, model.parameters()))


def _quantise(model: nn.Module, bits: int, group_size: int) -> None:
    choice = getattr(model, "quant_predicate", None)

    def suits(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        return choice(path, module) if choice is not None else True

    try:
        nn.quantize(model, group_size, bits, class_predicate=suits)
    except ValueError as error:
        raise OptionError(f"cannot quantise to {bits} bits: {_first_line(error)}") from error
    if not any(hasattr(module, "bits") for module in model.modules()):
        raise OptionError(f"no layer's width is a multiple of {group_size}: take a smaller group")


def max_length(config: Mapping[str, Any]) -> int | None:
    """Longest text in tokens that a decoder-only model's config.json allows; None: no end."""
    for part in (_text_config(config), config):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a wrapper's configuration that is about its language model; maybe empty."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def _eos(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    found = files.eos_token_ids(directory, config)
    return found or files.eos_token_ids(directory, _text_config(config))


def in_words(model: nn.Module) -> str:
    """The kind of weights, such as "bfloat16" or "4-bit, bfloat16"."""
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).rpartition(".")[2]
            sizes[name] = sizes.get(name, 0) + array.nbytes
    floating = max(sizes, key=lambda name: sizes[name])
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")})
    return f"{'/'.join(map(str, bits))}-bit, {floating}" if bits else floating


def _first_line(error: Exception) -> str:
    text = str(error.args[0]) if error.args else ""
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
