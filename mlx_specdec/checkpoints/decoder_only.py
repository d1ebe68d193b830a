"""The recipe of a decoder-only model: whatever mlx-lm makes of the source, unchanged.

mlx-lm's own classes rename, join and drop the source's tensors, and say what may be quantised and
what keeps its type, so that mlx-lm loads what is written here. Nothing is computed for that: the
arrays stay lazy. What it only renames is read from the source piece by piece; what it computes
(joined experts, for one) as a whole, from torch's archives by way of a temporary safetensors file.
Importing mlx-lm takes about a second (it brings transformers), hence inside.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, OptionError
from . import files, keys, shards
from .account import Account, take_stock
from .keys import Quantisation
from .plausible import check_numbers
from .recipes import Recipe
from .tensors import Tensor
from .writer import Change, write_weights


def decoder_only_recipe(
    directory: Path, config: Mapping[str, Any], quantisation: Quantisation | None, mixed: str = ""
) -> Recipe:
    """See `recipes.recipe_for`. Raises CheckpointError and OptionError as it says."""
    if config.get("model_file"):
        raise CheckpointError(
            f"{directory} needs its own Python file ({config['model_file']!a:.80}) to run, and "
            "code from checkpoints is never run"
        )
    source = files.Weights(directory)
    _check_names(directory)
    check_numbers(directory, config, len(source.infos))
    opened = _open(directory, _leaves_of(source))
    whole, found, origins = opened.config, opened.outlines, opened.origins
    quantised: dict[str, Quantisation] = {}
    if quantisation is not None:
        if "quantization" in whole:
            raise OptionError(f"{directory} is quantised already: leave --quantize out")
        quantised = _choose(opened.model, quantisation, mixed)
    if "vision_tower" not in getattr(opened.model, "model", {}):
        whole.pop("vision_config", None)
    casts = getattr(opened.model, "cast_predicate", lambda name: True)
    computed = found.keys() - origins.keys()
    account = _account(source, origins, sorted(computed), whole)
    del opened  # its arrays keep what they were made from
    work = _Computed(directory, source)

    def tensors(scratch: Path) -> Iterator[tuple[str, Tensor]]:
        fresh = work.arrays(scratch) if computed else {}
        for name in found:
            if name in origins:
                yield name, source.tensor(origins[name])
            else:
                yield name, Tensor.of(fresh.pop(name))

    notes = list(source.notes)
    wider = sorted(name for name, how in quantised.items() if how != quantisation)
    if wider:
        notes.append(f"packed as mlx-lm asks: {_list(wider)}")
    return Recipe(
        config=whole,
        tensors=tensors,
        outlines=found,
        account=account,
        format=source.format,
        paths=source.paths,
        scratch_nbytes=work.scratch_nbytes if computed else 0,
        quantised=quantised,
        keeps_dtype=lambda name: not casts(name),
        notes=tuple(notes),
    )


def _account(
    source: files.Weights,
    origins: Mapping[str, str],
    computed: list[str],
    config: Mapping[str, Any],
) -> Account:
    """What mlx-lm makes of each tensor. Which of them went into what it computes, it does not say:
    these are all that it neither hands through nor is known to leave out."""
    left = sorted(source.infos.keys() - origins.values())
    tied: dict[str, str] = {}
    dropped: dict[str, str] = {}
    for name in left:
        if name.endswith("lm_head.weight") and config.get("tie_word_embeddings"):
            twin = name.replace("lm_head", "model.embed_tokens")
            tied[name] = twin if twin in source.infos else "the embedding"
        elif name.endswith(("inv_freq", "rope.freqs")):
            dropped[name] = "it follows from config.json"
        elif not computed:
            dropped[name] = "mlx-lm's model has no such tensor"
    joined = [name for name in left if name not in tied and name not in dropped]
    return take_stock(
        source.contents, origins, tied=tied, dropped=dropped, joined=joined, computed=computed
    )


@dataclass(frozen=True)
class _Opened:
    """mlx-lm's model without its weights, its config, and what it makes of the source's tensors.

    weights: lazy, under mlx-lm's names. origins: our name -> the source's, of those that are handed
    through as they are.
    """

    model: Any
    config: dict[str, Any]
    weights: dict[str, mx.array]
    origins: dict[str, str]

    @property
    def outlines(self) -> dict[str, mx.array]:
        """Arrays of the same types and shapes, which hold nothing."""
        return {
            name: mx.zeros(array.shape, dtype=array.dtype) for name, array in self.weights.items()
        }


class _Computed:
    """What mlx-lm computes from a source, lazily. Arrays of torch's archives cannot be lazy, so the
    source is laid down as safetensors first."""

    def __init__(self, directory: Path, source: files.Weights) -> None:
        self._directory, self._source = directory, source

    @property
    def scratch_nbytes(self) -> int:
        return 0 if self._source.lazy else sum(i.nbytes for i in self._source.infos.values())

    def arrays(self, scratch: Path) -> dict[str, mx.array]:
        """All that mlx-lm makes, lazily; `scratch` has to stay until they are computed."""
        if self._source.lazy:
            return _open(self._directory, _leaves_of(self._source)).weights
        if not scratch.is_dir():
            scratch.mkdir()
            pairs = ((name, self._source.tensor(name)) for name in self._source.infos)
            write_weights(scratch, pairs, lambda name, tensor: Change(), shard_bytes=2**62)
        return _open(self._directory, dict(files.tensors(scratch))).weights


def _leaves_of(source: files.Weights) -> dict[str, mx.array]:
    """Lazy arrays for mlx-lm to work on; of torch's archives arrays that hold nothing."""
    if source.lazy:
        return {name: source.read(name) for name in source.infos}
    return {name: source.tensor(name).outline for name in source.infos}


def _check_names(directory: Path) -> None:
    found = shards.find(directory)
    for file in found.files:
        if found.format == "safetensors" and not file.name.startswith("model"):
            raise CheckpointError(
                f"{file} is not read by mlx-lm: give it a name that starts with model"
            )


def _open(directory: Path, leaves: Mapping[str, mx.array]) -> _Opened:
    """Have mlx-lm rename, join and drop `leaves`, without computing anything.

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
                strict=False,
                get_model_classes=lambda config: _catching(config, leaves, caught),
            )
    except CheckpointError:
        raise
    except KeyError as problem:
        raise CheckpointError(f"{directory} lacks {problem.args[0]!s:.200}") from problem
    except Exception as problem:  # its classes check nothing: whatever fails first tells
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise CheckpointError(f"{directory} cannot be read by mlx-lm: {reason:.200}") from problem
    names = {id(array): name for name, array in leaves.items()}
    origins = {name: names[id(array)] for name, array in caught.items() if id(array) in names}
    return _Opened(model, config, caught, origins)


def _catching(
    config: dict[str, Any], leaves: Mapping[str, mx.array], caught: dict[str, mx.array]
) -> tuple[type, Any]:
    """mlx-lm's classes for a config; the model is given `leaves`, hands its weights to `caught` and
    keeps none."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    try:
        plain, arguments = _get_classes(config)
    except ValueError as problem:
        raise CheckpointError(
            f"model_type {config.get('model_type')!a:.60} is not supported by the installed "
            "mlx-lm, nor is it a T5"
        ) from problem

    def sanitize(self: Any, weights: dict[str, mx.array]) -> Any:
        own = getattr(plain, "sanitize", None)
        return dict(leaves) if own is None else own(self, dict(leaves))

    def load_weights(self: Any, weights: list[tuple[str, mx.array]], strict: bool = True) -> Any:
        given = dict(weights)
        expected = {name: array.shape for name, array in tree_flatten(self.parameters())}
        _check(expected, {name: array.shape for name, array in given.items()})
        caught.update(given)
        return self

    body = {"load_weights": load_weights, "sanitize": sanitize}
    return type(plain.__name__, (plain,), body), arguments


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


def _choose(model: Any, default: Quantisation, mixed: str) -> dict[str, Quantisation]:
    """What mlx-lm's own converter would pack, and how."""
    own = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    if mixed:
        own = _mixed(model, default, mixed)
    chosen = {}
    for path, module in _leaves(model):
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % default.group_size:
            continue
        answer = own(path, module)
        how = default
        if isinstance(answer, Mapping):
            how = Quantisation(
                answer.get("bits", default.bits),
                answer.get("group_size", default.group_size),
                answer.get("mode", "affine"),
            )
            if not keys.is_known(how):
                raise OptionError(f"mlx-lm packs {path} in a way that is not supported here")
            if module.weight.shape[-1] % how.group_size:
                continue
        if answer:
            chosen[f"{path}.weight"] = how
    if not chosen:
        raise OptionError(
            f"no layer's width is a multiple of {default.group_size}: give a smaller --q-group-size"
        )
    return chosen


def _mixed(model: Any, default: Quantisation, mixed: str) -> Any:
    """mlx-lm's predicate of this name. Raises OptionError for a model that it does not suit."""
    from mlx_lm.convert import mixed_quant_predicate_builder

    try:
        return mixed_quant_predicate_builder(mixed, model, default.group_size)
    except ValueError as problem:
        raise OptionError(
            f"{mixed} does not suit this model, mlx-lm says ({problem}): leave --quant-predicate "
            "out"
        ) from problem


def _leaves(model: Any) -> list[tuple[str, Any]]:
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    return tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
