"""How byte-level vocabularies split text before they merge, by llama.cpp's names. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import first_line
from ...tensors import Malformed
from .header import COUNT, FLAG, NUMBERS, TEXT, TEXTS, Metadata

PLAIN = "default"


@dataclass(frozen=True)
class Rule:
    """split: a pattern, each of whose matches stands by itself. then_gpt2: GPT-2's own pattern
    comes after it. ignores_merges: a piece that is a token is one whatever the merges say.
    composes: text is brought to NFC. begins: a prompt begins with a token of its own unless the
    file denies it."""

    split: str = ""
    then_gpt2: bool = False
    ignores_merges: bool = False
    composes: bool = False
    begins: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_REST_WITH_SLASH = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_BY_THREE = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_BY_ONE = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SMALL, _CAPITAL = f"{_BEFORE}{_UPPER}*{_LOWER}+", f"{_BEFORE}{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_SMALL}|{_CAPITAL}|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = rf"{_SMALL}{_CONTRACTIONS}?|{_CAPITAL}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"

RULES: Mapping[str, Rule] = {
    name: rule
    for names, rule in (
        (f"{PLAIN} gpt-2 phi-2 mpt olmo", Rule(then_gpt2=True)),
        ("smollm starcoder refact", Rule(r"\p{N}", then_gpt2=True)),
        ("command-r", Rule(r"\p{N}", then_gpt2=True, composes=True)),
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            Rule(_BY_THREE, ignores_merges=True, begins=True),
        ),
        ("dbrx smaug-bpe", Rule(_BY_THREE)),
        ("qwen2 deepseek-r1-qwen megrez", Rule(_BY_ONE, composes=True)),
        ("stablelm2", Rule(_BY_ONE)),
        ("tekken", Rule(_TEKKEN, ignores_merges=True, begins=True)),
        ("gpt-4o llama4 kanana2", Rule(_GPT4O)),
    )
    for name in names.split()
}


_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_PREFIX = "tokenizer.ggml."
_LONGEST_MERGED = 256
"""Characters; SentencePiece makes tokens of 16, and the work grows with the square."""
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""What llama.cpp calls the tokens that have a use, and what Hugging Face does."""


class _Vocabulary:
    """Tokens by id with their types and scores, all three of one length. ids: of a token that is
    there twice the first. special: what a token is for -> its id."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.tokens: list[str] = self.get("tokens", TEXTS, [])
        self.types = self.get("token_type", NUMBERS, np.zeros(0)).astype(int).tolist()
        self.scores = self.get("scores", NUMBERS, np.zeros(0)).astype(float).tolist()
        for name, values in (("types", self.types), ("scores", self.scores)):
            if values and len(values) != len(self.tokens):
                raise Malformed(f"is damaged: {len(self.tokens)} tokens and {len(values)} {name}")
        self.types = self.types or [_NORMAL] * len(self.tokens)
        self.ids = {token: id for id, token in reversed([*enumerate(self.tokens)])}
        names = [name for name in _SPECIAL if f"{_PREFIX}{name}_token_id" in metadata]
        self.special = {name: self.get(f"{name}_token_id", COUNT) for name in names}
        if max(self.special.values(), default=-1) >= len(self.tokens):
            raise Malformed(
                f"is damaged: it names the token {max(self.special.values())} of {len(self.tokens)}"
            )

    def get(self, key: str, *rest: Any) -> Any:
        return self.metadata.get(f"{_PREFIX}{key}", *rest)

    def of_type(self, *types: int) -> list[int]:
        return [id for id, kind in enumerate(self.types) if kind in types]


def build(metadata: Metadata) -> str | None:
    """The text of tokenizer.json, None where the file has no vocabulary. Raises Malformed."""
    kind = metadata.get(f"{_PREFIX}model", TEXT, "none")
    if kind in ("none", "no_vocab"):
        return None
    builders = {"llama": _sentencepiece_bpe, "t5": _unigram, "gpt2": _byte_bpe}
    if kind not in builders:
        raise Malformed(
            f"has a vocabulary of the kind {kind!r:.40}, which is not read here: put the model's "
            "tokenizer.json beside it"
        )
    vocabulary = _Vocabulary(metadata)
    if not vocabulary.tokens:
        return None
    if kind != "gpt2" and not vocabulary.scores:
        raise Malformed("is damaged: its vocabulary has no scores")
    with library_errors():
        tokenizer = builders[kind](vocabulary)
        tokenizer.encode("a b")
        return str(tokenizer.to_str(pretty=False))


@contextmanager
def library_errors() -> Iterator[None]:
    """What `tokenizers` raises, as Malformed; its PanicException is no Exception."""
    try:
        yield
    except (Malformed, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as problem:
        reason = first_line(problem)
        raise Malformed(f"has a damaged vocabulary ({reason:.100}): download it again") from None


def settings(metadata: Metadata) -> dict[str, Any]:
    """What tokenizer_config.json says: the named tokens and the chat template."""
    vocabulary = _Vocabulary(metadata)
    told: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, id in vocabulary.special.items():
        told[f"{_SPECIAL[name]}_token"] = vocabulary.tokens[id]
    if "tokenizer.chat_template" in metadata:
        told["chat_template"] = metadata.get("tokenizer.chat_template", TEXT)
    return told


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    unknown = [vocabulary.tokens[id] for id in vocabulary.of_type(_UNKNOWN)]
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges(vocabulary),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of_type(_BYTE)),
        )
    )
    leading = vocabulary.get("add_space_prefix", FLAG, True)
    steps: list[Any] = []
    if vocabulary.get("remove_extra_whitespaces", FLAG, False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(_SPACE)] if leading else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if leading else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _finish(tokenizer, vocabulary, begins=True, ends=False)


def _unigram(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = vocabulary.of_type(_UNKNOWN)
    end = len(vocabulary.tokens)
    while end and vocabulary.tokens[end - 1] == f"[PAD{end - 1}]":
        end -= 1  # llama.cpp's converter fills it up with these
    tokenizer = Tokenizer(
        models.Unigram(
            list(zip(vocabulary.tokens[:end], vocabulary.scores[:end], strict=True)),
            unknown[0] if unknown else None,
            byte_fallback=bool(vocabulary.of_type(_BYTE)),
        )
    )
    steps: list[Any] = []
    charsmap = vocabulary.get("precompiled_charsmap", NUMBERS, np.zeros(0))
    if charsmap.size:
        steps.append(normalizers.Precompiled(charsmap.astype("u1").tobytes()))
    leading = vocabulary.get("add_space_prefix", FLAG, True)
    scheme = "always" if leading else "never"
    if vocabulary.get("remove_extra_whitespaces", FLAG, True):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" +"), " ")]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    else:
        # Metaspace takes a space that is there for the one in front that belongs to every text.
        steps += [normalizers.Prepend(_SPACE)] if leading else []
        steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    return _finish(tokenizer, vocabulary, begins=False, ends=True)


def _byte_bpe(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = vocabulary.get("pre", TEXT, PLAIN)
    rule = RULES.get(name)
    if rule is None:
        raise Malformed(
            f"splits text by the rule {name!r:.40}, which is not known here: put the model's "
            "tokenizer.json beside it"
        )
    ids = vocabulary.ids
    pairs: list[tuple[str, str]] = []
    for merge in vocabulary.get("merges", TEXTS, []):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise Malformed(f"is damaged: it merges {merge!a:.60}, which are no two of its tokens")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=rule.ignores_merges))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(rule.split), "isolated")] if rule.split else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.then_gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, vocabulary, begins=rule.begins, ends=False)


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins whichever neighbours make the token of the highest score; so these are
    all pairs that make a token, the highest score first; of Gemma the first token first."""
    ids, tokens = vocabulary.ids, vocabulary.tokens
    usable = {tokens[id] for id in vocabulary.of_type(_NORMAL, _USER, _UNUSED)}
    by_id = vocabulary.metadata.architecture.startswith("gemma")

    def cuts(token: str) -> Iterator[tuple[str, str]]:
        for cut in range(1, len(token) if len(token) <= _LONGEST_MERGED else 1):
            if token[:cut] in usable and token[cut:] in usable:
                yield token[:cut], token[cut:]

    ordered = sorted(usable, key=lambda t: (0 if by_id else -vocabulary.scores[ids[t]], ids[t]))
    return [pair for token in ordered for pair in cuts(token)]


def _finish(tokenizer: Any, vocabulary: _Vocabulary, *, begins: bool, ends: bool) -> Any:
    """Add the tokens that text is never split into, in the order of their ids, and those that
    belong around a prompt; begins, ends: whether they do where the metadata are silent."""
    from tokenizers import AddedToken, processors

    tokens = vocabulary.tokens
    controls = {*vocabulary.special.values(), *vocabulary.of_type(_CONTROL, _UNKNOWN)}
    tokenizer.add_tokens(
        [
            AddedToken(tokens[id], special=id in controls, normalized=False)
            for id in sorted({*controls, *vocabulary.of_type(_USER)})
            if tokens[id]
        ]
    )

    def around(name: str, default: bool) -> Sequence[tuple[str, int]]:
        if name in vocabulary.special and vocabulary.get(f"add_{name}_token", FLAG, default):
            return [(tokens[vocabulary.special[name]], vocabulary.special[name])]
        return []

    first, last = around("bos", begins), around("eos", ends)
    if first or last:
        template = [*(token for token, _ in first), "$A", *(token for token, _ in last)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[*first, *last]
        )
    return tokenizer
