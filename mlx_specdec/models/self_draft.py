"""A model at fewer bits, as a draft of itself. Norms, positions, biases and tables that are only
looked up are shared with the target and take no memory; of a T5 the whole encoder is."""

from __future__ import annotations

import re

import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import OptionError, first_line
from . import families
from .base import Base
from .number_format import evaluate, expanded, twin_of

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_ENCODER = re.compile(r"(model\.)?encoder\.(block|layers)\.")
BITS = (2, 3, 4, 5, 6, 8)
WIDER_BITS = 8
"""Of a matrix that embeds and is the output head as well, at least: its errors hurt most."""


def self_draft(target: Base, bits: int, group_size: int = 64) -> tuple[Base, int]:
    """Return a draft of the target's layers at `bits` a weight, and the bytes that it adds. Raises
    OptionError."""
    if bits not in BITS:
        raise OptionError(f"draft-bits must be one of {', '.join(map(str, BITS))}, not {bits}")
    network = target.network
    twin = quantized_twin(network, bits, group_size)
    evaluate(twin)
    shared = {id(array) for _, array in tree_flatten(network.parameters())}
    added = sum(a.nbytes for _, a in tree_flatten(twin.parameters()) if id(a) not in shared)
    try:
        return families.of_model(target).model(twin, target.max_length), added
    except ValueError as problem:
        raise OptionError(
            f"the target's own layers cannot draft: it reads its weights past its layers, which "
            f"fails where they are quantized ({first_line(problem):.100})"
        ) from problem


def quantized_twin(network: nn.Module, bits: int, group_size: int) -> nn.Module:
    """Return another tree of modules whose matrices have at most `bits` a weight. Raises
    OptionError."""
    twin = twin_of(network)
    # Tables that are not the output head as well: some layer has as many outputs as they have rows.
    modules = list(twin.named_modules())
    linear = nn.Linear | nn.QuantizedLinear
    heads = {m.weight.shape[0] for _, m in modules if isinstance(m, linear)}
    tables = [(path, m) for path, m in modules if isinstance(m, EMBEDDINGS)]
    shared = {path for path, m in tables if m.weight.shape[0] in heads}
    quantized = [
        (path, smaller)
        for path, module in modules
        if not _ENCODER.match(path)
        and path not in shared
        and (smaller := _quantized(module, bits, group_size)) is not None
    ]
    if not quantized:
        raise OptionError(
            f"the target has no weights that {bits} bits would make smaller: give fewer draft-bits"
        )
    twin.update_modules(tree_unflatten(quantized))
    return twin


def _quantized(module: nn.Module, bits: int, group_size: int) -> nn.Module | None:
    if isinstance(module, EMBEDDINGS):
        bits = max(bits, WIDER_BITS)
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        if module.bits <= bits:
            return None
        module = expanded(module)
    if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
        return None
    return module.to_quantized(group_size=group_size, bits=bits)
