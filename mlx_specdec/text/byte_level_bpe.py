"""vocab.json and merges.txt -> a byte-level BPE tokenizer, as RoBERTa's files describe one.

CodeT5 and CodeT5+ have it (closed like RoBERTa's texts: <s> ... </s>), FRED-T5 has GPT-2's (not
closed at all). Knows these files. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .tokenizer_files import content_of

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_ROBERTA = ("RobertaTokenizer", "RobertaTokenizerFast")
_GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
_NAMED = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
"""RoBERTa's special tokens, unless the settings name others."""
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_TOO_LARGE = 1 << 24


@dataclass(frozen=True)
class Read:
    """tokenizer: of the `tokenizers` library. closes: whether a prompt ends with </s>."""

    tokenizer: Any
    closes: bool


def is_here(directory: Path) -> bool:
    """Whether a directory has both files."""
    return all((directory / name).is_file() for name in (VOCABULARY, MERGES))


def read(
    directory: Path, named: Any, settings: Mapping[str, Any], added: Mapping[str, Any]
) -> Read:
    """Build the tokenizer.

    named: its class in transformers, None where no file says it. settings: special_tokens_map.json
    and tokenizer_config.json. added: added_tokens.json. Raises CheckpointError for damaged files
    and for classes that are not known here.
    """
    if named not in (None, *_ROBERTA, *_GPT2):
        raise CheckpointError(
            f"{directory} has a {named!s:.60}, which cannot be read here: give it a tokenizer.json"
        )
    vocabulary, merges = _vocabulary(directory / VOCABULARY), _merges(directory / MERGES)
    prefix_space = bool(settings.get("add_prefix_space", False))
    try:
        tokenizer = _build(vocabulary, merges, prefix_space)
        _add(tokenizer, directory, settings, added, closes=named not in _GPT2)
        if named not in _GPT2:
            _close(tokenizer, directory, settings, prefix_space)
    except CheckpointError:
        raise
    except Exception as problem:  # the library raises plain Exception
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise CheckpointError(
            f"{directory / VOCABULARY} and {MERGES} do not fit ({reason:.100}): download both again"
        ) from None
    return Read(tokenizer, closes=named not in _GPT2)


def _build(vocabulary: dict[str, int], merges: list[tuple[str, str]], prefix_space: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add(
    tokenizer: Any,
    directory: Path,
    settings: Mapping[str, Any],
    added: Mapping[str, Any],
    *,
    closes: bool,
) -> None:
    """Special tokens, each under the id that the files give it; without one, behind the rest."""
    decoder = settings.get("added_tokens_decoder")
    by_id = decoder if isinstance(decoder, Mapping) else {}
    tokens = {content_of(token): token for token in by_id.values()}
    for key, own in _NAMED.items():
        said = settings.get(key)
        if said is not None or (closes and tokenizer.token_to_id(own) is not None):
            tokens[content_of(said) or own] = said
    for key in _LISTS:
        listed = settings.get(key)
        tokens |= {content_of(each): each for each in (listed if isinstance(listed, list) else [])}
    try:
        ids = {content_of(token): int(id) for id, token in by_id.items()}
        ids |= {token: int(id) for token, id in added.items()}
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"{directory} has an added token whose id is no number: download its tokenizer again"
        ) from None
    tokens = dict.fromkeys(ids) | tokens
    for token in sorted(tokens, key=lambda token: ids.get(token, _TOO_LARGE)):
        if token is None:
            continue
        tokenizer.add_tokens([_added(token, tokens[token])])
        found = tokenizer.token_to_id(token)
        if ids.get(token, found) != found:
            raise CheckpointError(
                f"{directory} says {token!a:.60} is token {ids[token]}, and {VOCABULARY} makes "
                f"it {found}: download its tokenizer again"
            )


def _close(
    tokenizer: Any, directory: Path, settings: Mapping[str, Any], prefix_space: bool
) -> None:
    from tokenizers import processors

    pair = []
    for key in ("sep_token", "cls_token"):
        token = content_of(settings.get(key)) or _NAMED[key]
        id = tokenizer.token_to_id(token)
        if id is None:
            raise CheckpointError(
                f"{directory / VOCABULARY} lacks {token!a:.60}, which closes every text"
            )
        pair.append((token, id))
    tokenizer.post_processor = processors.RobertaProcessing(
        pair[0], pair[1], trim_offsets=True, add_prefix_space=prefix_space
    )


def _added(token: str, said: Any) -> Any:
    from tokenizers import AddedToken

    said = said if isinstance(said, Mapping) else {}
    flags = {name: bool(said.get(name, False)) for name in ("lstrip", "rstrip", "single_word")}
    return AddedToken(token, special=True, normalized=False, **flags)


def _vocabulary(file: Path) -> dict[str, int]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(
        type(id) is int and 0 <= id < _TOO_LARGE for id in found.values()
    ):
        raise CheckpointError(f"{file} is no JSON object of ids: download it again")
    return found


def _merges(file: Path) -> list[tuple[str, str]]:
    """Pairs in order; a first line that says the version is none."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except ValueError:
        raise CheckpointError(f"{file} is no UTF-8 text: download it again") from None
    found = []
    for number, line in enumerate(lines, 1):
        parts = line.rstrip("\r").split(" ")
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2 or not all(parts):
            raise CheckpointError(f"{file} has no pair in line {number}: download it again")
        found.append((parts[0], parts[1]))
    return found
