"""Embeddings of texts. Each is the mean of the last hidden states over the tokens of a text, scaled
to length 1."""

from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core.loop import PREFILL_CHUNK
from ..errors import DAMAGED, DecodingError
from ..types import FINAL, feed
from .pair import Pair

Vector = NDArray[np.float32]


def embed(pair: Pair, texts: Sequence[Sequence[int]]) -> Generator[None, None, list[Vector]]:
    """Compute the embeddings of texts. Texts never share a pass, so that no embedding depends on
    another text. The generator pauses after each chunk of a text.

    The vectors are means of the input of the output head in a decoder-only model, and of the
    encoder's output in an encoder-decoder. Special tokens are left out of the mean, unless a text
    has no other tokens.

    Args:
        texts: The token ids of each text, at least one.
    Returns:
        A float32 vector of Euclidean length 1 for each text.
    Raises:
        PromptError: A text is too long, or has ids that the model does not have.
        OptionError: The model does not return its last hidden states.
        DecodingError: An embedding is NaN or infinite.
    """
    vectors: list[Vector] = []
    for ids in texts:
        special = pair.tokenizer.special_ids
        left_out = frozenset() if special.issuperset(ids) else special
        total = mx.zeros((pair.target.width,))
        for states, tokens in _states(pair, ids):
            counted = mx.array([token not in left_out for token in tokens], dtype=mx.float32)
            total = total + counted @ states.astype(mx.float32)
            mx.eval(total)
            yield
        vector: Any = total / mx.linalg.norm(total)
        if not mx.all(mx.isfinite(vector)).item():
            raise DecodingError(DAMAGED)
        vectors.append(np.array(vector))
    return vectors


def _states(
    pair: Pair, ids: Sequence[int]
) -> Generator[tuple[mx.array, Sequence[int]], None, None]:
    """Yield the hidden states, (n, width), of each chunk of a text, and the n tokens of the
    chunk."""
    context = pair.target.open_batch([ids])
    if pair.target.kind == "encoder-decoder":
        start = mx.array([pair.target.prefix(ids)], dtype=mx.int32)
        yield context.advance(start).encoded[0][0], ids
        return
    for begin in range(0, len(ids), PREFILL_CHUNK):
        tokens = ids[begin : begin + PREFILL_CHUNK]
        yield feed(context, [tokens], (FINAL,)).hidden[FINAL][0], tokens
        context.evaluate()
