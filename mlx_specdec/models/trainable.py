"""A loaded model -> the same model with weights that can be trained, and what it says of texts.

Knows both families' passes over whole texts, several side by side and without caches: what is
padded lies behind a text, where nothing of it looks. Knows nothing of losses and of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map, tree_unflatten

from ..errors import OptionError
from .base import Base
from .encoder_decoder import EncoderDecoderModel
from .self_draft import expanded, twin_of
from .t5 import T5

Ids = Sequence[int]
_PACKED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


class Trainable(Protocol):
    """A network with what a training asks of it."""

    @property
    def network(self) -> nn.Module:
        """float32, not packed."""
        ...

    def inputs(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        """What `logits` takes for these prompts and the texts after them, none of them empty."""
        ...

    def logits(self, *inputs: mx.array) -> mx.array:
        """(rows, vocabulary): for each token of each text, text after text, what predicts it."""
        ...


def trainable(model: Base) -> Trainable:
    """A copy of a model to train; `model` stays as it is.

    Raises OptionError where a model's layers cannot be unpacked, or have no gradient.
    """
    network: nn.Module = twin_of(model.network)
    unpack(network)
    found: Trainable
    if isinstance(model, EncoderDecoderModel):
        found = TrainableT5(network)
    else:
        found = _decoder_only(network)
    _check_gradient(found, type(network).__module__.rpartition(".")[2])
    return found


def unpack(network: nn.Module) -> None:
    """Packed layers become plain ones, and every floating array float32, in place.

    Raises OptionError for packed layers of a kind that is not known.
    """
    plain = [(path, expanded(m)) for path, m in network.named_modules() if isinstance(m, _PACKED)]
    network.update_modules(tree_unflatten(plain))
    left = next((path for path, module in network.named_modules() if hasattr(module, "bits")), None)
    if left is not None:
        raise OptionError(f"{left} is quantised in a way that cannot be trained: unpack the model")
    wide = tree_map(
        lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
        network.parameters(),
    )
    network.update(wide)
    mx.eval(network.parameters())


class TrainableT5:
    """The encoder reads prompts, the decoder says texts."""

    def __init__(self, network: T5) -> None:
        self.network = network

    def inputs(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        """Sources and which of their places are any, decoder inputs, and the rows' places."""
        start = self.network.config.decoder_start_token_id
        sources, lengths = padded(prompts), [len(prompt) for prompt in prompts]
        mask = np.arange(sources.shape[1]) < np.array(lengths)[:, None]
        fed = padded([[start, *text[:-1]] for text in texts])
        wanted = places([(0, len(text)) for text in texts], fed.shape[1])
        return mx.array(sources), mx.array(mask), mx.array(fed), mx.array(wanted)

    def logits(self, *inputs: mx.array) -> mx.array:
        """As Trainable says."""
        sources, mask, fed, wanted = inputs
        network, length = self.network, fed.shape[1]
        encoded = network.project_encoded(network.encode(sources, mask))
        tables = network.decoder.bias_tables(length)
        masks = network.decoder.masks(tables, length, 0, length)
        states = network.decode(fed, [None] * len(encoded), encoded, masks, mask)
        rows = states.reshape(-1, states.shape[-1])[wanted]
        return network.head(rows[None])[0]


def padded(texts: Sequence[Ids]) -> np.ndarray:
    """(texts, longest) int32, zeros behind what is shorter."""
    result = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        result[row, : len(text)] = text
    return result


def places(spans: Sequence[tuple[int, int]], width: int) -> np.ndarray:
    """Places in the flattened (texts, width) of each text's span begin .. end - 1."""
    parts = [np.arange(a, b) + row * width for row, (a, b) in enumerate(spans)]
    return np.concatenate(parts).astype(np.int32)


def _decoder_only(network: nn.Module) -> Trainable:
    from .trainable_decoder import TrainableDecoder

    return TrainableDecoder(network)


def _check_gradient(found: Trainable, kind: str) -> None:
    """One small pass there and back. Raises OptionError."""
    inputs = found.inputs([[1, 2], [1]], [[2, 1], [1]])
    try:
        learn = nn.value_and_grad(
            found.network, lambda *given: found.logits(*given).square().mean()
        )
        mx.eval(learn(*inputs))
    except (ValueError, RuntimeError, AttributeError) as problem:
        raise OptionError(
            f"drafts of type {kind} cannot be trained: take another kind"
        ) from problem
