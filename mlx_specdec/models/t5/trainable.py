"""A T5 to be trained, and how texts of different lengths lie in one array."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .network import T5


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


Ids = Sequence[int]
