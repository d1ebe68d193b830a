"""vocab.json and merges.txt -> a byte-level BPE tokenizer, as RoBERTa's files describe one.

CodeT5 and CodeT5+ have it (closed like RoBERTa's texts: <s> ... </s>), FRED-T5 has GPT-2's (not
closed at all). transformers reads them too, in a second that no T5 is to pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, first_line
from .tokenizer_files import content_of, ids_of_added, read_json

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_ROBERTA = ("RobertaTokenizer", "RobertaTokenizerFast")
_GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"} | {
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
    try:
        tokenizer = _tokenizer(directory, settings, added, closes=named not in _GPT2)
    except CheckpointError:
        raise
    except Exception as problem:  # the library raises plain Exception
        raise CheckpointError(
            f"{directory / VOCABULARY} and {MERGES} do not fit ({first_line(problem):.100}): "
            "download both again"
        ) from None
    return Read(tokenizer, closes=named not in _GPT2)


def _tokenizer(
    directory: Path, settings: Mapping[str, Any], added: Mapping[str, Any], *, closes: bool
) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    # The library drops ids of other types, and the upper half of large ones.
    vocabulary = read_json(directory / VOCABULARY)
    if not all(type(id) is int and 0 <= id < _TOO_LARGE for id in vocabulary.values()):
        raise CheckpointError(
            f"{directory / VOCABULARY} has ids that no model has: download it again"
        )
    files = (str(directory / name) for name in (VOCABULARY, MERGES))
    tokenizer = Tokenizer(models.BPE.from_file(*files))
    space = bool(settings.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, directory, settings, added, closes=closes)
    if closes:
        around = [
            content_of(settings.get(key)) or _NAMED[key] for key in ("sep_token", "cls_token")
        ]
        if lacks := [token for token in around if tokenizer.token_to_id(token) is None]:
            raise CheckpointError(
                f"{directory / VOCABULARY} lacks {lacks[0]!a:.60}, which closes every text"
            )
        sep, cls = ((token, tokenizer.token_to_id(token) or 0) for token in around)
        tokenizer.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=space)
    return tokenizer


def _add_special(
    tokenizer: Any,
    directory: Path,
    settings: Mapping[str, Any],
    added: Mapping[str, Any],
    *,
    closes: bool,
) -> None:
    """Special tokens, each under the id that the files give it; without one, behind the rest."""
    from tokenizers import AddedToken

    decoder = settings.get("added_tokens_decoder")
    ids = ids_of_added(directory, decoder, added)
    listed = [settings.get(key) for key in _LISTS]
    pairs = [(content_of(each), each) for each in _values(decoder)]
    pairs += [
        (content_of(settings.get(key)) or own, settings.get(key))
        for key, own in _NAMED.items()
        if settings.get(key) is not None or (closes and tokenizer.token_to_id(own) is not None)
    ]
    pairs += [(content_of(each), each) for group in listed for each in _values(group)]
    said = dict.fromkeys(ids) | {token: each for token, each in pairs if token}
    for token in sorted(said, key=lambda token: ids.get(token, _TOO_LARGE)):
        told = said[token]
        flags = told if isinstance(told, Mapping) else {}
        how = {name: bool(flags.get(name)) for name in ("lstrip", "rstrip", "single_word")}
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False, **how)])
        id = tokenizer.token_to_id(token)
        if ids.get(token, id) != id:
            raise CheckpointError(
                f"{directory} says {token!a:.60} is token {ids[token]}, and {VOCABULARY} makes "
                f"it {id}: download its tokenizer again"
            )


def _values(told: Any) -> list[Any]:
    """What a list or an object of JSON holds; nothing of anything else."""
    return [*told.values()] if isinstance(told, dict) else told if isinstance(told, list) else []
