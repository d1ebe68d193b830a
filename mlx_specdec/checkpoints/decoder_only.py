"""The recipe of a decoder-only model: whatever mlx-lm makes of the source, unchanged.

mlx-lm's own classes rename, join and drop the source's tensors, and say what may be quantised and
what keeps its type, so that mlx-lm loads what is written here. Nothing is computed for that: the
arrays stay lazy. Importing mlx-lm takes about a second (it brings transformers), hence inside.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, OptionError
from . import files
from .keys import Q_BITS, Q_GROUP_SIZES, Quantisation
from .recipes import Recipe


def decoder_only_recipe(
    directory: Path, config: Mapping[str, Any], quantisation: Quantisation | None
) -> Recipe:
    """See `recipes.recipe_for`. Raises CheckpointError and OptionError as it says."""
    if config.get("model_file"):
        raise CheckpointError(
            f"{directory} needs its own Python file ({config['model_file']}) to run, and code from "
            "checkpoints is never run"
        )
    before = files.Weights(directory).infos
    for file in files.weight_files(directory):
        if not file.name.startswith("model"):
            raise CheckpointError(
                f"{file} is not read by mlx-lm: give it a name that starts with model"
            )
    model, whole, weights = _open(directory)
    quantised: dict[str, Quantisation] = {}
    if quantisation is not None:
        if "quantization" in whole:
            raise OptionError(f"{directory} is quantised already: leave --quantize out")
        quantised = _choose(model, quantisation)
    if "vision_tower" not in getattr(model, "model", {}):
        whole.pop("vision_config", None)
    casts = getattr(model, "cast_predicate", lambda name: True)
    # Where mlx-lm renames or joins tensors, what it left out cannot be told by name.
    dropped = sorted(before.keys() - weights.keys()) if weights.keys() <= before.keys() else []
    nbytes = sum(array.nbytes for array in weights.values())
    del weights

    def tensors() -> Iterator[tuple[str, mx.array]]:
        fresh = _open(directory)[2]
        for name in list(fresh):
            yield name, fresh.pop(name)

    notes = [f"left out, as mlx-lm does: {_list(dropped)}"] if dropped else []
    wider = sorted(name for name, how in quantised.items() if how != quantisation)
    if wider:
        notes.append(f"packed as mlx-lm asks: {_list(wider)}")
    return Recipe(
        config=whole,
        tensors=tensors,
        nbytes=nbytes,
        quantised=quantised,
        keeps_dtype=lambda name: not casts(name),
        notes=tuple(notes),
    )


def _open(directory: Path) -> tuple[Any, dict[str, Any], dict[str, mx.array]]:
    """mlx-lm's model without its weights, its config, and the weights that it would load, lazily.

    Raises CheckpointError for what mlx-lm does not have or cannot make sense of.
    """
    from mlx_lm.utils import load_model

    caught: dict[str, mx.array] = {}
    try:
        # Some of mlx-lm's models print remarks; standard output is for text alone.
        with contextlib.redirect_stdout(sys.stderr):
            model, config = load_model(
                directory,
                lazy=True,
                get_model_classes=lambda config: _catching(config, caught),
            )
    except CheckpointError:
        raise
    except KeyError as problem:
        raise CheckpointError(f"{directory} lacks {problem.args[0]}") from problem
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise CheckpointError(f"{directory} cannot be read by mlx-lm: {reason}") from problem
    return model, config, caught


def _catching(config: dict[str, Any], caught: dict[str, mx.array]) -> tuple[type, Any]:
    """mlx-lm's classes for a config; the model hands its weights to `caught` and keeps none."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    try:
        plain, arguments = _get_classes(config)
    except ValueError as problem:
        raise CheckpointError(
            f"model_type {config.get('model_type')!r} is not supported by the installed mlx-lm, "
            "nor is it a T5"
        ) from problem

    def load_weights(self: Any, weights: list[tuple[str, mx.array]], strict: bool = True) -> Any:
        given = dict(weights)
        expected = {name: array.shape for name, array in tree_flatten(self.parameters())}
        _check(expected, {name: array.shape for name, array in given.items()})
        caught.update(given)
        return self

    return type(plain.__name__, (plain,), {"load_weights": load_weights}), arguments


def _check(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    if missing := expected.keys() - given.keys():
        raise CheckpointError(f"the weights lack {min(missing)}: download the model again")
    if extra := given.keys() - expected.keys():
        raise CheckpointError(f"the weights have {min(extra)}, which config.json does not ask for")
    for name in sorted(expected):
        if expected[name] != given[name]:
            raise CheckpointError(
                f"{name} has shape {given[name]} where config.json asks for {expected[name]}"
            )


def _choose(model: Any, default: Quantisation) -> dict[str, Quantisation]:
    """What mlx-lm's own converter would pack, and how."""
    own = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    chosen = {}
    for path, module in _leaves(model):
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % default.group_size:
            continue
        answer = own(path, module)
        how = default
        if isinstance(answer, Mapping):
            how = Quantisation(
                answer.get("bits", default.bits), answer.get("group_size", default.group_size)
            )
            if answer.get("mode", "affine") != "affine" or how.bits not in Q_BITS:
                raise OptionError(f"mlx-lm packs {path} in a way that is not supported here")
            if how.group_size not in Q_GROUP_SIZES or module.weight.shape[-1] % how.group_size:
                continue
        if answer:
            chosen[f"{path}.weight"] = how
    if not chosen:
        raise OptionError(
            f"no layer's width is a multiple of {default.group_size}: give a smaller --q-group-size"
        )
    return chosen


def _leaves(model: Any) -> list[tuple[str, Any]]:
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    return tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
