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
        context, total = pair.target.open_batch([ids]), mx.zeros((pair.target.width,))
        encodes = pair.target.kind == "encoder-decoder"
        size = len(ids) if encodes else PREFILL_CHUNK
        for begin in range(0, len(ids), size):
            tokens = ids[begin : begin + size]
            if encodes:
                start = mx.array([pair.target.prefix(ids)], dtype=mx.int32)
                states = context.advance(start).encoded[0][0]
            else:
                states = feed(context, [tokens], (FINAL,)).hidden[FINAL][0]
            counted = mx.array([token not in left_out for token in tokens], dtype=mx.float32)
            total = total + counted @ states.astype(mx.float32)
            mx.eval(total)
            if not encodes:
                context.evaluate()
            yield
        vector: Any = total / mx.linalg.norm(total)
        if not mx.all(mx.isfinite(vector)).item():
            raise DecodingError(DAMAGED)
        vectors.append(np.array(vector))
    return vectors
