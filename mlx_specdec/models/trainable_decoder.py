"""Any decoder-only model of mlx-lm, to be trained. Imports mlx-lm (about a second)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..contracts import FINAL
from .decoder_only import DecoderOnlyModel
from .trainable_t5 import Ids, padded, places


class TrainableDecoder:
    """trainable.Trainable over an mlx-lm model.

    Raises OptionError for a model that does not show the input of its head.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        # Some models take a kernel without gradient unless they are told.
        network.train()
        self._model = DecoderOnlyModel(network)
        self._model.width  # noqa: B018  it raises here, before anything is trained

    def inputs(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        """Prompts with their texts, and the rows' places."""
        tokens = padded([[*p, *t[:-1]] for p, t in zip(prompts, texts, strict=True)])
        spans = [
            (len(prompt) - 1, len(prompt) - 1 + len(text))
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return mx.array(tokens), mx.array(places(spans, tokens.shape[1]))

    def logits(self, *inputs: mx.array) -> mx.array:
        """As Trainable says. The head sees the rows that are asked for, and no others."""
        tokens, wanted = inputs
        states = self._model.run(tokens, None, (FINAL,)).hidden[FINAL]
        rows = states.reshape(-1, states.shape[-1])[wanted]
        return self._model.head(rows[None])[0]
