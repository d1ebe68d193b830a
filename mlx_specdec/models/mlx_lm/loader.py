"""Loading of weights by mlx-lm's loader, which gets tensors that this package has read. mlx-lm
builds the model, and renames and joins the tensors. Arrays stay lazy."""

import contextlib
import io
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from ...checkpoints.files import (
    LM_HEAD,
    TEXT_CONFIG,
    Weights,
    check_runs_no_code,
    text_config,
)
from ...checkpoints.quantization import Quantization
from ...checkpoints.tensors import UNFIT, check_weights
from ...errors import CheckpointError, first_line
from .. import foreign
from ..drafters import mtp_layers
from ..number_format import same_matrix
from ..patches import CAUGHT_WEIGHTS
from . import mends, rotary, spellings

TIES = "tie_word_embeddings"
LACKS = re.compile(r"missing \d+ required positional arguments?: (.*)")
"""Matches Python's message about entries of config.json that mlx-lm needs, and names them."""
EMBEDDING_NAME = re.compile(r"(^|\.)(embed_tokens|(word_)?embeddings|wte)\.weight$")
"""Matches the names of embeddings, in families whose output head may be tied to them."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint as mlx-lm reads it.

    Attributes:
        model: The model, whose weights are not loaded yet.
        config: The contents of config.json, with the changes that loading needs.
        weights: Lazy tensors by the names of the model's parameters."""

    model: nn.Module
    config: dict[str, Any]
    weights: dict[str, mx.array]

    @property
    def quantized(self) -> dict[str, Quantization]:
        """The quantization of each matrix that is stored quantized, by the path of its module."""
        return {
            path: Quantization(module.bits, module.group_size, getattr(module, "mode", "affine"))
            for path, module in self.model.named_modules()
            if hasattr(module, "bits") and f"{path}.scales" in self.weights
        }


def open_model(
    directory: Path, config: Mapping[str, Any], source: Weights, tensors: Mapping[str, mx.array]
) -> Opened:
    """Have mlx-lm build the model and rename, join and drop the tensors of a checkpoint.

    Layers for multi-token prediction are left out: mlx-lm drops some of them, and would take others
    for layers of the model.

    Args:
        source: The checkpoint's weights.
        tensors: All tensors of the source by name.
    Raises:
        CheckpointError: If mlx-lm cannot build the model, if tensors do not fit, or if the
            checkpoint has code in its files."""
    check_runs_no_code(directory, config)
    config = _with_own_head(config, source)
    is_mtp = mtp_layers.known(config)
    tensors = {name: array for name, array in tensors.items() if not is_mtp(name)}
    caught: dict[str, mx.array] = {}
    stated = foreign.entry_of(config, (array.dtype for array in tensors.values()))
    changes = {key: config[key] for key in (TIES, TEXT_CONFIG) if key in config}
    try:
        if not stated and "quantization" not in config:
            # The weights are not quantized, even if config.json says that they are.
            changes["quantization_config"] = None
        # Some of mlx-lm's models print remarks, which must not get into the standard output.
        with contextlib.redirect_stdout(sys.stderr):
            model, full_config = load_model(
                directory,
                lazy=True,
                strict=False,
                model_config=changes,
                get_model_classes=lambda config: _catching(config, tensors, caught, stated),
            )
        rotary.check(model, full_config)
    except MemoryError:
        raise
    except CheckpointError as problem:
        raise CheckpointError(f"{directory}: {problem}") from problem.__cause__
    except Exception as problem:  # mlx-lm does not validate settings, so any error can occur
        message = foreign.explain(problem, stated, cannot_build(problem))
        raise CheckpointError(f"{directory}: {message}") from problem
    CAUGHT_WEIGHTS.undo(model)
    # The model's extended class is part of a reference cycle, and its methods refer to both
    # dictionaries. Clear them, or every tensor would stay in memory until the garbage collection.
    weights = {**caught}
    is_packed = foreign.is_packed(array.dtype for array in weights.values())
    if "quantization" not in full_config and not is_packed:
        full_config = foreign.with_parts(
            full_config, lambda part: {k: v for k, v in part.items() if k != "quantization_config"}
        )
    tensors.clear()
    caught.clear()
    full_config = _spelled(full_config, classes(full_config)[1], both=False)
    full_config["model_type"] = spellings.family_type(full_config)
    return Opened(model, full_config, weights)


def _with_own_head(config: Mapping[str, Any], source: Weights) -> dict[str, Any]:
    """Return config.json with an untied head if the stored head differs from the embedding, as
    transformers 5 does. mlx-lm drops the stored head of a tied model."""
    text = text_config(config)
    head = next((name for name in source.infos if name.endswith(LM_HEAD)), None)
    stated = False in (config.get(TIES), text.get(TIES))
    if head is None or stated or TIES not in rotary.names_of(classes(config)[1]):
        return dict(config)
    if (table := embedding_of(head, source)) is None or same_matrix(head, table, source):
        return dict(config)
    untied = {**config, TIES: False}
    return untied if text is config else {**untied, TEXT_CONFIG: {**text, TIES: False}}


def embedding_of(head: str, source: Weights) -> str | None:
    """Return the name of the embedding that a tied head repeats, or None if there is none."""
    infos = source.infos
    tables = [name for name in infos if EMBEDDING_NAME.search(name)]
    equal = (name for name in tables if infos[name].shape == infos[head].shape)
    return next(equal, tables[0] if tables else None)


def cannot_build(problem: Exception) -> str:
    """Return an error message about a model that mlx-lm cannot build."""
    if missing := LACKS.search(str(problem)):
        return (
            f"config.json lacks {missing[1]}, which mlx-lm needs for models of this type: update "
            "mlx-lm, or take a checkpoint that mlx-lm has converted"
        )
    reason = f"{problem.args[0]!s} is missing" if type(problem) is KeyError else first_line(problem)
    return (
        f"config.json does not describe a model that mlx-lm can build ({reason:.200}): check it, "
        "or update mlx-lm"
    )


def classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], Any]:
    """Return mlx-lm's classes of a model and of its arguments. Raises CheckpointError if mlx-lm
    does not support the model's type."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError("config.json has no model_type: it does not describe a model")
    family = {**config, "model_type": spellings.family_type(config)}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            return _get_classes(family)
    except SystemExit as problem:  # mlx-lm's olmo wants a package
        raise CheckpointError(
            f"mlx-lm cannot read models of type {kind} here: {said.getvalue().strip():.200}"
        ) from problem
    except ValueError as problem:
        raise CheckpointError(
            f"model_type {kind!a:.60} is not supported by the installed mlx-lm, nor is it one of "
            "the encoder-decoders that are read here: T5, T5Gemma 2, BART and its kin"
        ) from problem


def _catching(
    config: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    caught: dict[str, mx.array],
    stated: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Return classes for mlx-lm's loader whose models sanitize `tensors`, and put the result into
    `caught` instead of loading it. stated: The quantization in config.json, for error messages."""
    model_class, arguments = classes(config)
    spellings.check_read(config, arguments)

    def sanitize(plain: Any, model: nn.Module, weights: dict[str, mx.array]) -> Any:
        try:
            kind = config.get("model_type")
            part = text_config(config)
            given = spellings.renamed(kind, tensors)
            if kind in mends.TENSOR_MENDS:
                given = mends.TENSOR_MENDS[kind](part, given)
            kept = mends.dropped(model, given)
            return given if plain is None else {**plain(model, given), **kept}
        except KeyError as problem:
            raise CheckpointError(
                f"weight {problem.args[0]!s:.200} is missing: {UNFIT}"
            ) from problem

    def load_weights(
        _: Any, model: nn.Module, weights: list[tuple[str, mx.array]], strict: bool = True
    ) -> nn.Module:
        expected = {name: array.shape for name, array in tree_flatten(model.parameters())}
        try:
            check_weights(expected, {name: array.shape for name, array in weights})
        except CheckpointError as problem:
            raise CheckpointError(foreign.explain(problem, stated)) from None
        caught.update(weights)
        return model

    def build(settings: Any) -> nn.Module:
        model = model_class(settings)
        mends.mend(model, config)
        CAUGHT_WEIGHTS.extend([model], load_weights=load_weights, sanitize=sanitize)
        return model

    return build, SimpleNamespace(from_dict=partial(arguments_of, arguments=arguments))


def arguments_of(config: Mapping[str, Any], arguments: Any) -> Any:
    """Return a family's arguments, of its class `arguments`, from a config.json in any of the
    spellings that `rotary`, `spellings` and `foreign` translate. Raises CheckpointError, and
    whatever the family raises."""
    return arguments.from_dict(_spelled(config, arguments, both=True))


def _spelled(config: Mapping[str, Any], arguments: Any, *, both: bool) -> dict[str, Any]:
    names = rotary.names_of(arguments)
    rotating = rotary.spelled(foreign.spelled_old(config), names, both=both)
    return spellings.spelled(rotating, names)
