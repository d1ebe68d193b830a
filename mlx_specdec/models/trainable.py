"""A loaded model -> the same model with weights that can be trained, and what it says of texts.

Passes over whole texts, several side by side and without caches: what is padded lies behind a text,
where nothing of it looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_unflatten

from ..errors import OptionError
from . import families
from .base import Base
from .self_draft import expanded, twin_of
from .t5.trainable import Ids

_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


class Trainable(Protocol):
    """A network with what a training asks of it."""

    @property
    def network(self) -> nn.Module:
        """float32, not quantized."""
        ...

    def inputs(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        """What `logits` takes for these prompts and the texts after them, none of them empty."""
        ...

    def logits(self, *inputs: mx.array) -> mx.array:
        """(rows, vocabulary): for each token of each text, text after text, what predicts it."""
        ...


def trainable(model: Base) -> Trainable:
    """A copy of a model to train; `model` stays as it is.

    Raises OptionError where a model's layers cannot be dequantized, or have no gradient.
    """
    network = twin_of(model.network)
    dequantize(network)
    trained = families.of_model(model).trainable(network)
    _check_gradient(trained, type(network).__module__.rpartition(".")[2])
    return trained


def dequantize(network: nn.Module) -> None:
    """Quantized layers become plain ones, and every floating array float32, in place.

    Raises OptionError for quantized layers of a kind that is not known.
    """
    plain = [
        (path, expanded(m)) for path, m in network.named_modules() if isinstance(m, _QUANTIZED)
    ]
    network.update_modules(tree_unflatten(plain))
    left = next((path for path, module in network.named_modules() if hasattr(module, "bits")), None)
    if left is not None:
        raise OptionError(
            f"{left} is quantized in a way that cannot be trained: dequantize the model"
        )
    wide = tree_map(
        lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
        network.parameters(),
    )
    network.update(wide)
    mx.eval(network.parameters())


def _check_gradient(trained: Trainable, kind: str) -> None:
    """One small pass there and back. Raises OptionError."""
    inputs = trained.inputs([[1, 2], [1]], [[2, 1], [1]])
    try:
        learn = nn.value_and_grad(
            trained.network, lambda *given: trained.logits(*given).square().mean()
        )
        mx.eval(learn(*inputs))
    except (ValueError, RuntimeError, AttributeError) as problem:
        raise OptionError(
            f"drafts of type {kind} cannot be trained: take another kind"
        ) from problem
