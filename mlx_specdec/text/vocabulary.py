"""The tokens that two vocabularies share, compared by their texts."""

import functools
from collections.abc import Sequence

import mlx.core as mx

from ..errors import VocabularyError
from .tokenizer import BYTE, BYTES, Tokenizer

LEAST_SHARED = 0.05
"""Smallest share of the target's tokens that a draft model must have. A model with fewer
tokens would propose almost nothing."""
UNKNOWN = "<unk>"


def common_size(target: Tokenizer, draft: Tokenizer, target_width: int, draft_width: int) -> int:
    """Return the size of the distribution that both models share.

    Args:
        target_width: Width of the target's logits.
        draft_width: Width of the draft's logits.
    Raises:
        VocabularyError: If an id has different tokens in the two tokenizers.
    """
    pairs = zip(target.pieces[:target_width], draft.pieces[:draft_width], strict=False)
    for id, pieces in enumerate(pairs):
        if None not in pieces and pieces[0] != pieces[1]:
            raise VocabularyError(
                f"target and draft model have different tokenizers: token {id} is {pieces[0]!r} in "
                f"the target and {pieces[1]!r} in the draft; take a draft of the target's family"
            )
    return min(target_width, target.size)


def shared_tokens(
    target: Tokenizer, draft: Tokenizer, target_width: int, draft_width: int
) -> tuple[list[int], list[int]]:
    """Map the target's ids to the ids of a draft with another vocabulary.

    Returns:
        (shared, fed), with one entry for each id of the target. shared: The draft's id for the same
        text, or -1. fed: The draft's id to read in its place: the shared id, or else the longest
        token that the text begins with.
    Raises:
        VocabularyError: If the vocabularies have hardly a token in common.
    """
    size = min(target_width, target.size)
    written = enumerate(written_texts(draft)[:draft_width])
    own = [(text, id) for id, text in written if text is not None and id not in draft.special_ids]
    by_text = dict(reversed(own))
    texts = token_bytes(target)[:size]
    shared = [
        -1 if text is None or id in target.special_ids else by_text.get(text, -1)
        for id, text in enumerate(texts)
    ]
    common = sum(id >= 0 for id in shared)
    if common < LEAST_SHARED * size:
        raise VocabularyError(f"target and draft model share only {common} of {size} tokens")
    for id in target.eos_token_ids:
        if id < size and draft.eos_token_ids:
            shared[id] = draft.eos_token_ids[0]

    def fed(text: bytes) -> int:
        # `draft.encode` would not do: many tokenizers put a space before a text.
        begun = (text[:end] for end in range(len(text), 0, -1))
        return next((by_text[begin] for begin in begun if begin in by_text), 0)

    return shared, [id if id >= 0 else fed(texts[at] or b"") for at, id in enumerate(shared)]


def written_texts(tokenizer: Tokenizer) -> list[bytes | None]:
    """Return the bytes that the tokenizer writes for each id. Ids without a token, the unknown
    token, and byte pieces with the text of another piece have None."""
    read = [*zip(tokenizer.pieces, token_bytes(tokenizer), strict=True)]
    written = {text for piece, text in read if not BYTE.fullmatch(piece or "")}
    return [
        None if piece == UNKNOWN or (BYTE.fullmatch(piece or "") and text in written) else text
        for piece, text in read
    ]


@functools.lru_cache(maxsize=1)
def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Return the bytes of each id's text, or None for ids without a token. The list must not be
    changed."""
    pieces = tokenizer.pieces
    spaced = any(piece is not None and piece.startswith("\u2581") for piece in pieces)

    def text(piece: str) -> bytes:
        if spaced:
            byte = BYTE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()
        if all(letter in BYTES for letter in piece):
            return bytes(BYTES[letter] for letter in piece)
        return piece.encode()

    return [None if piece is None else text(piece) for piece in pieces]


def token_piece(tokenizer: Tokenizer, id: int) -> bytes | None:
    """Return the bytes of a token's text, or None for an id without a text."""
    pieces = token_bytes(tokenizer)
    return pieces[id] if id < len(pieces) else None


class Translation:
    """A translation between the ids of a target and a draft, made by `shared_tokens`."""

    def __init__(self, shared: Sequence[int], fed: Sequence[int]) -> None:
        self._fed = tuple(fed)
        self._fed_ids = mx.array(self._fed, dtype=mx.int32)
        self._columns = mx.array([max(0, id) for id in shared], dtype=mx.int32)
        self._missing = mx.array([id < 0 for id in shared])
        mx.eval(self._fed_ids, self._columns, self._missing)

    def feed(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft's ids for tokens of the target, or 0 for ids outside of the target's
        vocabulary."""
        return [self._fed[token] if 0 <= token < len(self._fed) else 0 for token in tokens]

    def feed_array(self, tokens: mx.array) -> mx.array:
        """Return the draft's ids for tokens of the target. Both arrays are (...) int32."""
        return self._fed_ids[tokens]

    def rows(self, logits: mx.array) -> mx.array:
        """Return the draft's logits (..., draft's vocabulary) over the target's ids. Tokens that
        the draft lacks get -inf, so that only shared tokens are proposed."""
        rows = mx.take(logits, self._columns, axis=-1)
        return mx.where(self._missing, mx.array(-mx.inf, dtype=rows.dtype), rows)
