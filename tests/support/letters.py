"""A tokenizer of characters and short words, for tests of grammars."""

import functools
from collections.abc import Sequence
from dataclasses import replace

from mlx_specdec.core.constraint import Alphabet
from mlx_specdec.engine.pair import Pair
from mlx_specdec.text.tokenizer import Tokenizer

from .pairs import pair_for

END, OTHER_END = 1, 2
PIECES = [
    "<unk>",
    "</s>",
    "<stop>",
    *'abcdefgh0123456789{}[]":, ',
    "ab",
    "ba",
    "abc",
    '": ',
    '{"',
    "12",
]
SIZE = 64


class Letters(Tokenizer):
    """Tokens of one letter and of several; the rest of the model's 64 ids have none."""

    eos_token_ids = (END,)
    special_ids = frozenset({0, END, OTHER_END})
    size, digest, ids = SIZE, "letters", {piece: id for id, piece in enumerate(PIECES)}

    def encode(self, text: str) -> list[int]:
        """The longest piece first."""
        ids = []
        while text:
            piece = max(filter(text.startswith, PIECES), key=len, default=None)
            ids.append(0 if piece is None else PIECES.index(piece))
            text = text[len(piece or text[0]) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(PIECES[id] for id in ids if 2 < id < len(PIECES))


@functools.cache
def alphabet(pieces: tuple[str, ...]) -> Alphabet:
    """Return the alphabet of some tokens. Tokens that begin with "<" are special."""
    special = [id for id, piece in enumerate(pieces) if piece.startswith("<")]

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = max(filter(text.startswith, pieces), key=len, default="")
            if not piece:
                return ids
            ids.append(pieces.index(piece))
            text = text[len(piece) :]
        return ids

    return Alphabet([piece.encode() for piece in pieces], special, encode)


def regex(pattern: str) -> str:
    """Compile a regular expression."""
    from mlx_specdec.core.grammar import compiled

    grammar = compiled(None, pattern, None)
    assert grammar is not None
    return grammar


SCHEMA = {
    "type": "object",
    "properties": {
        "ab": {"type": "string", "pattern": "^[abc]{2,6}$"},
        "ba": {"type": "array", "items": {"type": "integer", "maximum": 999}, "maxItems": 3},
    },
    "required": ["ab", "ba"],
    "additionalProperties": False,
}


def bound(name: str) -> Pair:
    """Return a pair with the tokenizer `Letters`."""
    return replace(pair_for(name), tokenizer=Letters(), eos_token_ids=frozenset({END}))
