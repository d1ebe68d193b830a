"""Tokenizers of T5s that have no tokenizer.json: spiece.model, or byte-level ones.

T5 and mT5 have spiece.model and sentinels behind it. CodeT5 and CodeT5+ have RoBERTa's vocab.json
and merges.txt (closed like its texts: <s> ... </s>), FRED-T5 has GPT-2's (not closed at all), and
ByT5 has bytes without a single merge. transformers reads them too, in a second that no T5 is to
pay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, first_line
from .file_tokenizer import FileTokenizer
from .tokenizer_files import (
    LETTERS,
    MOST_EXTRA,
    DirectoryTokenizer,
    content_of,
    extra_ids,
    read_json,
    read_sentence_piece,
)

EXTRA = 100
"""T5's sentinels, where nothing says how many there are."""
_SENTINEL = re.compile(r"<extra_id_(\d{1,6})>", re.ASCII)
VOCABULARY, MERGES = "vocab.json", "merges.txt"
BYTES_ALONE = "ByT5Tokenizer"
_ROBERTA = ("RobertaTokenizer", "RobertaTokenizerFast")
_GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"} | {
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
"""RoBERTa's special tokens, unless the settings name others."""
_FIRST = ("pad_token", "eos_token", "unk_token")
"""ByT5's ids 0 to 2, in front of the bytes (arXiv 2105.13626, section 3)."""
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SENTINELS = 125
"""ByT5's, where nothing says how many there are."""
_TOO_LARGE = 1 << 24


class SentencePieceTokenizer(DirectoryTokenizer):
    """spiece.model, read by sentencepiece, with T5's extra ids behind it.

    <extra_id_0> has the highest id of all, the next one the id before it.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(directory)
        self._processor = read_sentence_piece(directory / "spiece.model")
        self._count: int = self._processor.get_piece_size()
        # Some of these pieces may be sentinels (mT5's).
        last = str(self._processor.id_to_piece(self._count - 1)) if self._count else ""
        self._extra = extra_ids(settings, 0 if "<extra_id_" in last else EXTRA)
        self.size = self._count + self._extra
        eos = self._processor.eos_id()
        self.eos_token_ids = () if eos < 0 else (eos,)
        controls = [id for id in range(self._count) if self._processor.is_control(id)]
        self.special_ids = frozenset([*controls, *range(self._count, self.size)])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        # Every second part is the number of a sentinel.
        parts = _SENTINEL.split(text)
        for place, part in enumerate(parts):
            if place % 2 == 0:
                # Spaces around sentinels belong to them.
                part = part if place == 0 else part.lstrip(" ")
                part = part if place == len(parts) - 1 else part.rstrip(" ")
                ids += self._processor.encode(part)
            elif int(part) < self._extra:
                ids.append(self.size - 1 - int(part))
            else:
                ids += self._processor.encode(f"<extra_id_{part}>")
        return [*ids, *self.eos_token_ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([id for id in ids if id not in self.special_ids])

    def pieces(self) -> list[str | None]:
        sentinels = [f"<extra_id_{index}>" for index in reversed(range(self._extra))]
        return [*map(self._processor.id_to_piece, range(self._count)), *sentinels]


def load(directory: Path, settings: Mapping[str, Any]) -> SentencePieceTokenizer | FileTokenizer:
    """Read the tokenizer of a T5 without tokenizer.json. settings: of tokenizer_config.json.

    Raises CheckpointError for missing and damaged files, and for classes that are not known here.
    """
    named = settings.get("tokenizer_class")
    named = named or read_json(directory / "config.json").get("tokenizer_class")
    if named != BYTES_ALONE and (directory / "spiece.model").is_file():
        return SentencePieceTokenizer(directory, settings)
    if named not in (None, BYTES_ALONE, *_ROBERTA, *_GPT2):
        raise CheckpointError(
            f"{directory} has a {named!s:.60}, which cannot be read here: give it a tokenizer.json"
        )
    settings = read_json(directory / "special_tokens_map.json") | dict(settings)
    ids = _ids_of_added(directory, settings)
    closes = named not in _GPT2
    try:
        if named == BYTES_ALONE:
            made = _bytes_alone(directory, settings, ids)
        else:
            made = _from_files(directory, settings, ids, closes=closes)
    except CheckpointError:
        raise
    except Exception as problem:  # the library raises plain Exception
        raise CheckpointError(
            f"the tokenizer files of {directory} do not fit ({first_line(problem):.100}): "
            "download them again"
        ) from None
    return FileTokenizer(directory, settings, ends_with_eos=closes, made=made)


def _from_files(
    directory: Path, settings: Mapping[str, Any], added: Mapping[str, int], *, closes: bool
) -> Any:
    """The library's tokenizer of vocab.json and merges.txt. added: ids of special tokens, as the
    files give them. closes: whether texts are closed as RoBERTa's."""
    from tokenizers import models, processors

    vocabulary, merges = directory / VOCABULARY, directory / MERGES
    if not (vocabulary.is_file() and merges.is_file()):
        raise CheckpointError(
            f"{directory} has no tokenizer.json, no spiece.model, and no vocab.json with merges.txt"
        )
    # The library drops ids of other types, and the upper half of large ones.
    if not all(type(id) is int and 0 <= id < _TOO_LARGE for id in read_json(vocabulary).values()):
        raise CheckpointError(f"{vocabulary} has ids that no model has: download it again")
    space = bool(settings.get("add_prefix_space", False))
    tokenizer = _byte_level(
        models.BPE.from_file(str(vocabulary), str(merges)), add_prefix_space=space
    )
    entries = _special_entries(tokenizer, settings, closes=closes)
    for token in sorted({**added, **entries}, key=lambda token: added.get(token, _TOO_LARGE)):
        _add(tokenizer, token, entries.get(token))
        id = tokenizer.token_to_id(token)
        if added.get(token, id) != id:
            raise CheckpointError(
                f"{directory} says {token!a:.60} is token {added[token]}, and {VOCABULARY} makes "
                f"it {id}: download its tokenizer again"
            )
    if closes:
        names = [content_of(settings.get(key)) or _NAMED[key] for key in ("sep_token", "cls_token")]
        if lacks := [name for name in names if tokenizer.token_to_id(name) is None]:
            raise CheckpointError(f"{vocabulary} lacks {lacks[0]!a:.60}, which closes every text")
        sep, cls = ((name, tokenizer.token_to_id(name)) for name in names)
        tokenizer.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=space)
    return tokenizer


def _bytes_alone(directory: Path, settings: Mapping[str, Any], added: Mapping[str, int]) -> Any:
    """The library's tokenizer of ByT5."""
    from tokenizers import models

    first = [content_of(settings.get(key)) or _NAMED[key] for key in _FIRST]
    bytes_only = [*first, *LETTERS]
    behind = _behind(settings, added, len(bytes_only))
    vocabulary = {token: id for id, token in enumerate(bytes_only)} | behind
    if len(vocabulary) < len(bytes_only) + len(behind):
        raise CheckpointError(f"{directory} has two special tokens of one name, or one of a byte's")
    tokenizer = _byte_level(models.BPE(vocabulary, []), add_prefix_space=False, use_regex=False)
    decoder = settings.get("added_tokens_decoder")
    for id, (key, token) in enumerate(zip(_FIRST, first, strict=True)):
        flags = decoder.get(str(id)) if isinstance(decoder, Mapping) else settings.get(key)
        _add(tokenizer, token, flags, strips=True)
    for token in behind:
        _add(tokenizer, token, None)
    return tokenizer


def _byte_level(model: Any, **how: bool) -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**how)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _special_entries(
    tokenizer: Any, settings: Mapping[str, Any], *, closes: bool
) -> dict[str, Any]:
    """Special tokens that the settings name, and RoBERTa's that the vocabulary has, each with what
    the settings have for it."""
    entries = _values(settings.get("added_tokens_decoder"))
    found = [(content_of(entry), entry) for entry in entries]
    for key, usual in _NAMED.items():
        entry = settings.get(key)
        if entry is not None or (closes and tokenizer.token_to_id(usual) is not None):
            found.append((content_of(entry) or usual, entry))
    listed = (entry for key in _LISTS for entry in _values(settings.get(key)))
    found += [(content_of(entry), entry) for entry in listed]
    return {token: entry for token, entry in found if token}


def _add(tokenizer: Any, token: str, entry: Any, strips: bool = False) -> None:
    """Add a special token. entry: the files' object for it, which may have flags. strips: whether
    it takes the spaces around it with it where no flag says so."""
    from tokenizers import AddedToken

    entry = entry if isinstance(entry, Mapping) else {}
    flags = {name: bool(entry.get(name, strips)) for name in ("lstrip", "rstrip")}
    flags["single_word"] = bool(entry.get("single_word"))
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False, **flags)])


def _behind(settings: Mapping[str, Any], added: Mapping[str, int], begin: int) -> dict[str, int]:
    """Tokens behind ByT5's bytes: where a file has their ids these, else in the order listed."""
    placed = {token: id for token, id in added.items() if not 0 <= id < len(_FIRST)}
    if not placed:
        lists = (_values(settings.get(key)) for key in _LISTS)
        usual = (f"<extra_id_{index}>" for index in range(extra_ids(settings, _SENTINELS)))
        listed = next(filter(None, lists), usual)
        tokens = filter(None, map(content_of, listed))
        placed = {token: begin + place for place, token in enumerate(tokens)}
    for token, id in placed.items():
        if not begin <= id < begin + MOST_EXTRA:
            raise CheckpointError(f"{token!a:.60} has id {id}, which is no place behind the bytes")
    return placed


def _values(value: Any) -> list[Any]:
    """The entries of a list or an object of JSON; none of anything else."""
    if isinstance(value, dict):
        return [*value.values()]
    return value if isinstance(value, list) else []


def _ids_of_added(directory: Path, settings: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the tokens that were added to a vocabulary, by added_tokens.json before the settings'
    added_tokens_decoder. Raises CheckpointError for what is no id."""
    decoder = settings.get("added_tokens_decoder")
    pairs = decoder.items() if isinstance(decoder, Mapping) else ()
    added = read_json(directory / "added_tokens.json")
    try:
        ids = {text: int(id) for id, token in pairs if (text := content_of(token))}
        return ids | {token: int(id) for token, id in added.items()}
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"{directory} has an added token whose id is no number: download its tokenizer again"
        ) from None
