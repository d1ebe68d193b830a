"""Draft models made of the target's own layers, at fewer bits or with fewer layers. Norms,
positions, biases and tables that are only looked up are shared with the target and take no memory.
The draft of an encoder-decoder model also shares the encoder and its outputs."""

import re

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoints.quantization import Q_BITS
from ..errors import OptionError, check_one_of, first_line
from . import families
from .base import Base
from .encoder_decoder.context import EncoderDecoderModel, share_equal_encoder
from .number_format import evaluate, expanded, twin_of

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_ENCODER = re.compile(r"(model\.)?encoder\.(block|layers)\.")
WIDER_BITS = 8
"""Minimum bits of an embedding that is also the output head, because its errors hurt most."""


def self_draft(
    target: Base, bits: int | None, group_size: int = 64, *, layers: int = 0
) -> tuple[Base, int]:
    """Return a draft model made of the target's layers, and the bytes that it adds. `bits` per
    weight may be None, which leaves the weights as they are, and `layers` 0, which means all.
    Raises OptionError if the target's layers cannot be used like this."""
    if bits is not None:
        check_one_of("draft-bits", bits, Q_BITS)
    family = families.of_model(target)
    network = target.network
    twin = twin_of(network) if bits is None else quantized_twin(network, bits, group_size)
    chosen = evenly(layers, len(family.layers(twin))) if layers else []
    try:
        if layers:
            family.cut(twin, chosen)
        evaluate(twin)
        draft = family.model(twin, target.max_length)
        if layers:
            # Some models cannot run without all of their layers.
            mx.eval(draft.open([1]).advance(mx.array([[1]])).logits)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as problem:
        if layers:
            raise OptionError("the target's layers cannot draft without the others") from problem
        raise OptionError(
            f"the target's own layers cannot draft: it reads its weights past its layers, which "
            f"fails where they are quantized ({first_line(problem):.100})"
        ) from problem
    if isinstance(draft, EncoderDecoderModel) and isinstance(target, EncoderDecoderModel):
        draft.share_encoder(target)
    return draft, added_nbytes(draft, target)


def added_nbytes(draft: Base, target: Base) -> int:
    """Return the bytes of a draft's weights that it does not share with the target."""
    shared = {id(array) for _, array in tree_flatten(target.network.parameters())}
    return sum(a.nbytes for _, a in tree_flatten(draft.network.parameters()) if id(a) not in shared)


def bytes_beside(draft: Base, target: Base) -> int:
    """Let a draft use the target's encoder if both are equal. Return the bytes that the draft adds
    to the target."""
    return added_nbytes(draft, target) if share_equal_encoder(draft, target) else draft.nbytes


def evenly(count: int, depth: int) -> list[int]:
    """Return the numbers of `count` evenly spaced layers of a model with `depth` layers, including
    the first and the last. Raises OptionError if `count` exceeds `depth`."""
    if count > depth:
        raise OptionError(f"layers must be 1 to the target's {depth}, not {count}")
    return [round(at * (depth - 1) / max(1, count - 1)) for at in range(count)]


def quantized_twin(network: nn.Module, bits: int, group_size: int) -> nn.Module:
    """Return a copy of a network whose matrices have at most `bits` per weight. Raises OptionError
    if none of the matrices would become smaller."""
    twin = twin_of(network)
    # A linear layer with as many outputs as a table has rows is the output head. The table is then
    # only looked up, and can be shared.
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
