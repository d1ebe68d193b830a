"""Vocabularies of Llama models -> tokenizer.json, for the `tokenizers` library to read.

Knows SentencePiece's merging (Llama 1 and 2), and has transformers say tiktoken's (Llama 3); knows
the token that belongs before a text. Knows nothing of files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ....errors import first_line
from ..malformed import Malformed

SPACE = "▁"
LONGEST = 256
"""Characters of a token; cutting one in every way takes the square of its length."""


@dataclass(frozen=True)
class Pieces:
    """SentencePiece's vocabulary. controls: ids that text is never cut into. plain: ids of the
    pieces that merging may make; the others are controls, the unknown one and bytes.

    leads: a space is put before every text. collapses: several spaces become one, none is left at
    the ends.
    """

    tokens: Sequence[str]
    scores: Sequence[float]
    controls: Sequence[int]
    plain: Sequence[int]
    unknown: int | None
    begin: int | None
    leads: bool
    collapses: bool
    has_bytes: bool


def sentencepiece_json(pieces: Pieces) -> str:
    """The text of tokenizer.json. Raises Malformed."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    _quieten_transformers()
    from transformers.convert_slow_tokenizer import generate_merges

    tokens = pieces.tokens
    ids = _ids(tokens)
    with _library_errors():
        merges = generate_merges(
            {tokens[id]: id for id in pieces.plain},
            {tokens[id]: pieces.scores[id] for id in pieces.plain},
        )
        tokenizer = Tokenizer(
            models.BPE(
                ids,
                merges,
                unk_token=None if pieces.unknown is None else tokens[pieces.unknown],
                fuse_unk=True,
                byte_fallback=pieces.has_bytes,
            )
        )
        steps: list[Any] = []
        if pieces.collapses:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        steps += [normalizers.Prepend(SPACE)] if pieces.leads else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] if pieces.leads else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        tokenizer.add_tokens(
            [AddedToken(tokens[id], special=True, normalized=False) for id in pieces.controls]
        )
        return _text(tokenizer, None if pieces.begin is None else tokens[pieces.begin])


def tiktoken_json(tokens: Sequence[bytes], special: Sequence[str]) -> str:
    """The text of tokenizer.json. tokens: in the order of their ranks, which are their ids, and
    then the special tokens, of which the first begins a text. Raises Malformed."""
    _quieten_transformers()
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ids = _ids(tokens)

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ids  # its own way of reading needs tiktoken

    with _library_errors():
        return _text(Converter(extra_special_tokens=special).converted(), special[0])


def _quieten_transformers() -> None:
    """Where torch is absent it says so when it is imported, as if that were a problem. mlx-lm sets
    the same variable."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _text(tokenizer: Any, begin: str | None) -> str:
    from tokenizers import processors

    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return str(tokenizer.to_str(pretty=False))


def _ids(tokens: Iterable[Any]) -> dict[Any, int]:
    ids: dict[Any, int] = {}
    for id, token in enumerate(tokens):
        if token in ids:
            raise Malformed(f"is damaged: {token!a:.60} is both token {ids[token]} and {id}")
        if len(token) > LONGEST:
            raise Malformed(f"is damaged: token {id} has {len(token)} characters")
        ids[token] = id
    return ids


@contextmanager
def _library_errors() -> Iterator[None]:
    """What `tokenizers` raises, as a sentence: Exception itself, and where its own code stumbles
    PanicException, which is none."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as problem:
        reason = first_line(problem)
        raise Malformed(f"has a damaged vocabulary ({reason:.100})") from None
