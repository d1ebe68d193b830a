"""Vocabularies of Llama models -> tokenizer.json, for the `tokenizers` library to read.

Knows SentencePiece's merging (Llama 1 and 2) and tiktoken's (Llama 3), and the tokens that belong
around a text. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPACE = "▁"
LONGEST = 256
"""Characters of a token; cutting one in every way takes the square of its length."""
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Unusable(Exception):
    """What is wrong with a vocabulary; the text follows a file's name."""


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
    leads: bool = True
    collapses: bool = False
    has_bytes: bool = True


@dataclass(frozen=True)
class Ranked:
    """tiktoken's vocabulary: tokens in the order of their ranks, which are their ids, and then the
    special tokens."""

    tokens: Sequence[bytes]
    special: Sequence[str]
    begin: str


def sentencepiece_json(pieces: Pieces) -> str:
    """The text of tokenizer.json. Raises Unusable."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    ids = _ids(pieces.tokens)
    usable = {pieces.tokens[id]: id for id in pieces.plain}
    order = [(-pieces.scores[id], id) for id in range(len(pieces.tokens))]
    unknown = None if pieces.unknown is None else pieces.tokens[pieces.unknown]
    try:
        tokenizer = Tokenizer(
            models.BPE(
                ids,
                [pair for _, pair in sorted(_cuts(usable, order))],
                unk_token=unknown,
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
            [
                AddedToken(pieces.tokens[id], special=True, normalized=False)
                for id in sorted(pieces.controls)
            ]
        )
        if pieces.begin is not None:
            _begin_with(tokenizer, pieces.tokens[pieces.begin], pieces.begin)
        return str(tokenizer.to_str(pretty=False))
    except BaseException as problem:
        raise _unusable(problem) from None


def tiktoken_json(ranked: Ranked) -> str:
    """The text of tokenizer.json. Raises Unusable."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = _letters()
    tokens = ["".join(letters[byte] for byte in token) for token in ranked.tokens]
    ids = _ids(tokens)
    order = [(id, id) for id in range(len(tokens))]
    try:
        tokenizer = Tokenizer(
            models.BPE(
                ids,
                [pair for _, pair in sorted(_cuts(ids, order))],
                ignore_merges=True,
                fuse_unk=False,
            )
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in ranked.special]
        )
        _begin_with(tokenizer, ranked.begin, len(tokens) + list(ranked.special).index(ranked.begin))
        return str(tokenizer.to_str(pretty=False))
    except BaseException as problem:
        raise _unusable(problem) from None


def _begin_with(tokenizer: Any, token: str, id: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], special_tokens=[(token, id)]
    )


def _ids(tokens: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for id, token in enumerate(tokens):
        if token in found:
            raise Unusable(f"is damaged: {token!a:.60} is both token {found[token]} and {id}")
        if len(token) > LONGEST:
            raise Unusable(f"is damaged: token {id} has {len(token)} characters")
        found[token] = id
    return found


def _cuts(
    usable: Mapping[str, int], order: Sequence[tuple[float, int]]
) -> list[tuple[tuple[float, ...], tuple[str, str]]]:
    """All pairs of tokens that make a token. Both ways of merging join whichever neighbours make
    the first token in `order`; which pair makes it does not matter, the shorter left one is first.
    """
    found: list[tuple[tuple[float, ...], tuple[str, str]]] = []
    for token, id in usable.items():
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in usable and pair[1] in usable:
                found.append(((*order[id], cut), pair))
    return found


def _letters() -> list[str]:
    """The character that byte-level BPE writes for each byte: printable ones stand for themselves,
    the others for those from 256 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _unusable(problem: BaseException) -> BaseException:
    """What the library raises, as a sentence: Exception itself, and where its own code stumbles
    PanicException, which is none. What is not the library's is given back as it is."""
    if isinstance(problem, KeyboardInterrupt | SystemExit | MemoryError):
        return problem
    reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return Unusable(f"has a damaged vocabulary ({reason:.100})")
