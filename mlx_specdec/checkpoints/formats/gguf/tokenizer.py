"""A GGUF file's vocabulary -> tokenizer.json, for the `tokenizers` library to read.

Knows the three kinds that llama.cpp calls "llama" (SentencePiece's BPE), "t5" (its unigram model)
and "gpt2" (bytes, with a rule that splits text first). Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .header import Damaged
from .metadata import Metadata
from .text_rules import PLAIN, RULES, Rule

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_PREFIX = "tokenizer.ggml."
_LONGEST_MERGED = 256
"""Characters; SentencePiece makes tokens of 16, and the work grows with the square."""
_KNOWN = "bos", "eos", "unknown", "padding"


class _Vocabulary:
    """Tokens by id with their types and scores, all three of one length."""

    def __init__(self, metadata: Metadata) -> None:
        self.tokens = metadata.texts(f"{_PREFIX}tokens")
        self.types = metadata.numbers(f"{_PREFIX}token_type").astype(int).tolist()
        self.scores = metadata.numbers(f"{_PREFIX}scores").astype(float).tolist()
        for name, found in (("types", self.types), ("scores", self.scores)):
            if found and len(found) != len(self.tokens):
                raise Damaged(f"is damaged: {len(self.tokens)} tokens and {len(found)} {name}")
        self.types = self.types or [_NORMAL] * len(self.tokens)
        self.special = {id: self.tokens[id] for id in self._ids(metadata)}

    def of_type(self, *types: int) -> list[int]:
        """Ids of all tokens of some types."""
        return [id for id, kind in enumerate(self.types) if kind in types]

    def _ids(self, metadata: Metadata) -> list[int]:
        """Ids of the tokens that the metadata name by what they are for."""
        keys = [f"{_PREFIX}{name}_token_id" for name in _KNOWN]
        ids = [metadata.count(key) for key in keys if key in metadata]
        if any(id >= len(self.tokens) for id in ids):
            raise Damaged(f"is damaged: it names the token {max(ids)} of {len(self.tokens)}")
        return ids


def build(metadata: Metadata) -> str | None:
    """The text of tokenizer.json, None where the file has no vocabulary.

    Raises Damaged for a vocabulary that contradicts itself, or of a kind that is not known here.
    """
    kind = metadata.text(f"{_PREFIX}model", "none")
    if kind in ("none", "no_vocab"):
        return None
    builders: Mapping[str, Callable[[Metadata, _Vocabulary], Any]] = {
        "llama": _sentencepiece_bpe,
        "t5": _unigram,
        "gpt2": _byte_bpe,
    }
    if kind not in builders:
        raise Damaged(
            f"has a vocabulary of the kind {kind!r:.40}, which is not read here: put the model's "
            "tokenizer.json beside it"
        )
    vocabulary = _Vocabulary(metadata)
    if not vocabulary.tokens:
        return None
    try:
        tokenizer = builders[kind](metadata, vocabulary)
        tokenizer.encode("a b")
        return str(tokenizer.to_str(pretty=False))
    except Damaged:
        raise
    # The library raises Exception itself, and PanicException, which is none, where its own code
    # stumbles over what it was given.
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise Damaged(f"has a damaged vocabulary ({reason:.100}): download it again") from None


def settings(metadata: Metadata) -> dict[str, Any]:
    """What tokenizer_config.json says: the named tokens and the chat template."""
    vocabulary = _Vocabulary(metadata)
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, ours in zip(_KNOWN, ("bos", "eos", "unk", "pad"), strict=True):
        key = f"{_PREFIX}{name}_token_id"
        if key in metadata:
            found[f"{ours}_token"] = vocabulary.tokens[metadata.count(key)]
    if "tokenizer.chat_template" in metadata:
        found["chat_template"] = metadata.text("tokenizer.chat_template")
    return found


def _sentencepiece_bpe(metadata: Metadata, vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if not vocabulary.scores:
        raise Damaged("is damaged: its vocabulary has no scores")
    ids = _ids_of(vocabulary.tokens)
    unknown = [vocabulary.tokens[id] for id in vocabulary.of_type(_UNKNOWN)[:1]]
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            _merges(vocabulary, ids),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of_type(_BYTE)),
        )
    )
    leading = metadata.flag(f"{_PREFIX}add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if leading else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if leading else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_special(tokenizer, vocabulary)
    _around(tokenizer, metadata, vocabulary, begins=True, ends=False)
    return tokenizer


def _unigram(metadata: Metadata, vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if not vocabulary.scores:
        raise Damaged("is damaged: its vocabulary has no scores")
    unknown = vocabulary.of_type(_UNKNOWN)
    end = _without_padding(vocabulary)
    pairs = list(zip(vocabulary.tokens[:end], vocabulary.scores[:end], strict=True))
    tokenizer = Tokenizer(
        models.Unigram(
            pairs,
            unknown[0] if unknown else None,
            byte_fallback=bool(vocabulary.of_type(_BYTE)),
        )
    )
    steps: list[Any] = []
    charsmap = metadata.numbers(f"{_PREFIX}precompiled_charsmap")
    if charsmap.size:
        steps.append(normalizers.Precompiled(charsmap.astype("u1").tobytes()))
    leading = metadata.flag(f"{_PREFIX}add_space_prefix", True)
    scheme = "always" if leading else "never"
    if metadata.flag(f"{_PREFIX}remove_extra_whitespaces", True):
        steps += [
            normalizers.Replace(Regex(text), to) for text, to in (("^ +| +$", ""), (" +", " "))
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    else:
        # Metaspace takes a space that is there for the one in front that belongs to every text.
        steps += [normalizers.Prepend(_SPACE)] if leading else []
        steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    _add_special(tokenizer, vocabulary)
    _around(tokenizer, metadata, vocabulary, begins=False, ends=True)
    return tokenizer


def _byte_bpe(metadata: Metadata, vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    name = metadata.text(f"{_PREFIX}pre", PLAIN)
    rule = RULES.get(name)
    if rule is None:
        raise Damaged(
            f"splits text by the rule {name!r:.40}, which is not known here: put the model's "
            "tokenizer.json beside it"
        )
    ids = _ids_of(vocabulary.tokens)
    pairs: list[tuple[str, str]] = []
    for merge in metadata.texts(f"{_PREFIX}merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise Damaged(f"is damaged: it merges {merge!a:.60}, which are no two of its tokens")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=rule.ignores_merges))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(rule)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, vocabulary)
    _around(tokenizer, metadata, vocabulary, begins=rule.begins, ends=False)
    return tokenizer


def _splitter(rule: Rule) -> Any:
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(text), "isolated") for text in rule.splits]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.then_gpt2)
    return pre_tokenizers.Sequence([*steps, last]) if steps else last


def _ids_of(tokens: list[str]) -> dict[str, int]:
    """Of a token that is there twice the first id."""
    ids: dict[str, int] = {}
    for id, token in enumerate(tokens):
        ids.setdefault(token, id)
    return ids


def _merges(vocabulary: _Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins whichever neighbours make the token of the highest score; so these are
    all pairs that make a token, the highest score first."""
    usable = {vocabulary.tokens[id] for id in vocabulary.of_type(_NORMAL, _USER, _UNUSED)}
    found: list[tuple[float, int, int, str, str]] = []
    for token in usable:
        if len(token) > _LONGEST_MERGED:
            continue
        score = vocabulary.scores[ids[token]]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                found.append((-score, ids[token], cut, left, right))
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _without_padding(vocabulary: _Vocabulary) -> int:
    """Where the vocabulary ends but for what llama.cpp's converter fills it up with."""
    end = len(vocabulary.tokens)
    while end and vocabulary.tokens[end - 1] == f"[PAD{end - 1}]":
        end -= 1
    return end


def _add_special(tokenizer: Any, vocabulary: _Vocabulary) -> None:
    """Tokens that text is never split into, in the order of their ids."""
    from tokenizers import AddedToken

    controls = {*vocabulary.special, *vocabulary.of_type(_CONTROL, _UNKNOWN)}
    added = [
        AddedToken(vocabulary.tokens[id], special=id in controls, normalized=False)
        for id in sorted({*controls, *vocabulary.of_type(_USER)})
        if vocabulary.tokens[id]
    ]
    tokenizer.add_tokens(added)


def _around(
    tokenizer: Any, metadata: Metadata, vocabulary: _Vocabulary, *, begins: bool, ends: bool
) -> None:
    """Which tokens belong around a prompt; begins, ends: where the metadata are silent."""
    from tokenizers import processors

    template, special = ["$A"], []
    for name, place, default in (("bos", 0, begins), ("eos", 9, ends)):
        key = f"{_PREFIX}{name}_token_id"
        if key in metadata and metadata.flag(f"{_PREFIX}add_{name}_token", default):
            id = metadata.count(key)
            template.insert(place, vocabulary.tokens[id])
            special.append((vocabulary.tokens[id], id))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special
        )
