"""Conversion of a GGUF file's vocabulary to tokenizer.json and tokenizer_config.json."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import first_line
from ..tensors import Malformed
from .gguf_blocks import TABLES
from .gguf_header import Metadata

DEFAULT_RULE = "default"
"""llama.cpp's name of the rule for files that name none."""


SPLIT_RULES: Mapping[str, Mapping[str, Any]] = {
    name: rule for rule in TABLES["split_rules"] for name in rule["names"]
}
"""llama.cpp's name -> the rule by which a byte-level tokenizer splits text; see gguf.toml."""

END_TOKENS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<eos>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|return|>", "<|call|>", "<｜end▁of▁sentence｜>"),
)
"""Names of control tokens that always end a sequence in llama.cpp."""
_RETURN, _END = "<|return|>", "<|end|>"
"""If a vocabulary has the first, the second ends a message but not the sequence."""
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_KEY_PREFIX = "tokenizer.ggml."
_LONGEST_MERGED = 256
"""Longest token, in characters, whose merges are reconstructed. The time is quadratic in it."""
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""llama.cpp's name of a special token -> Hugging Face's name."""
_PUT_BESIDE = "put the model's tokenizer.json beside it"


class _Vocabulary:
    """The tokens of a GGUF file by id, with types and scores. ids: Token -> the first id. special:
    Name in _SPECIAL_TOKENS -> id."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.tokens: list[str] = self.get("tokens", list, [])
        self.types = self.get("token_type", np.ndarray, np.zeros(0)).astype(int).tolist()
        self.scores = self.get("scores", np.ndarray, np.zeros(0)).astype(float).tolist()
        for name, values in (("types", self.types), ("scores", self.scores)):
            if values and len(values) != len(self.tokens):
                raise Malformed(f"is damaged: {len(self.tokens)} tokens and {len(values)} {name}")
        self.types = self.types or [_NORMAL] * len(self.tokens)
        self.ids = {token: id for id, token in reversed([*enumerate(self.tokens)])}
        names = [name for name in _SPECIAL_TOKENS if f"{_KEY_PREFIX}{name}_token_id" in metadata]
        self.special = {name: self.get(f"{name}_token_id", int) for name in names}

    def get(self, key: str, *rest: Any) -> Any:
        return self.metadata.get(f"{_KEY_PREFIX}{key}", *rest)

    def of_type(self, *types: int) -> list[int]:
        return [id for id, kind in enumerate(self.types) if kind in types]


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """Return the content of tokenizer.json and tokenizer_config.json by name, {} without a
    vocabulary. Raises Malformed."""
    kind = metadata.get(f"{_KEY_PREFIX}model", str, "none")
    builders = {"llama": _sentencepiece_bpe, "t5": _unigram, "gpt2": _byte_bpe}
    if kind in ("none", "no_vocab"):
        return {}
    if kind not in builders:
        unknown = f"has a vocabulary of the kind {kind!r:.40}, which is not read here"
        raise Malformed(f"{unknown}: {_PUT_BESIDE}")
    vocabulary = _Vocabulary(metadata)
    try:
        tokenizer = builders[kind](vocabulary)
        tokenizer.encode("a b")
        made = str(tokenizer.to_str(pretty=False))
    except (Malformed, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as problem:  # PanicException is not a subclass of Exception
        reason = first_line(problem)
        raise Malformed(f"has a damaged vocabulary ({reason:.100}): download it again") from None
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, id in vocabulary.special.items():
        settings[f"{_SPECIAL_TOKENS[name]}_token"] = vocabulary.tokens[id]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata.get("tokenizer.chat_template", str)
    return {"tokenizer.json": made, "tokenizer_config.json": json.dumps(settings, indent=2)}


def ends_by_name(metadata: Metadata) -> list[int]:
    """Return the ids of the control tokens with a name in END_TOKENS. Raises Malformed."""
    tokens = metadata.get(f"{_KEY_PREFIX}tokens", list, [])
    types = metadata.get(f"{_KEY_PREFIX}token_type", np.ndarray, np.zeros(0))[: len(tokens)]
    controls = {tokens[id]: int(id) for id in np.flatnonzero(types == _CONTROL)}
    names = (name for name in END_TOKENS if name != _END or _RETURN not in controls)
    return [controls[name] for name in names if name in controls]


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
    leading = vocabulary.get("add_space_prefix", bool, True)
    steps: list[Any] = []
    if vocabulary.get("remove_extra_whitespaces", bool, False):
        around = normalizers.Replace(Regex(r"\A +| +\z"), "")
        steps += [around, normalizers.Replace(Regex(" {2,}"), " ")]
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
        end -= 1  # llama.cpp's converter pads the vocabulary with these
    tokenizer = Tokenizer(
        models.Unigram(
            list(zip(vocabulary.tokens[:end], vocabulary.scores[:end], strict=True)),
            unknown[0] if unknown else None,
            byte_fallback=bool(vocabulary.of_type(_BYTE)),
        )
    )
    steps: list[Any] = []
    charsmap = vocabulary.get("precompiled_charsmap", np.ndarray, np.zeros(0))
    if charsmap.size:
        steps.append(normalizers.Precompiled(charsmap.astype("u1").tobytes()))
    leading = vocabulary.get("add_space_prefix", bool, True)
    scheme = "always" if leading else "never"
    if vocabulary.get("remove_extra_whitespaces", bool, True):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" +"), " ")]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    else:
        # Metaspace would not prepend a space to a text that begins with one.
        steps += [normalizers.Prepend(_SPACE)] if leading else []
        steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    return _finish(tokenizer, vocabulary, begins=False, ends=True)


def _byte_bpe(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = vocabulary.get("pre", str, DEFAULT_RULE)
    rule = SPLIT_RULES.get(name)
    if rule is None:
        unknown = f"splits text by the rule {name!r:.40}, which is not known here"
        raise Malformed(f"{unknown}: {_PUT_BESIDE}")
    ids = vocabulary.ids
    pairs = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges", list, [])]
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=rule.get("ignores_merges", False)))
    if rule.get("composes"):
        tokenizer.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(rule["split"]), "isolated")] if "split" in rule else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.get("then_gpt2", False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, vocabulary, begins=rule.get("begins", False), ends=False)


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that join to a token, in SentencePiece's order of merging. This is
    the order of the joined token's score, or of its id for Gemma."""
    ids, tokens = vocabulary.ids, vocabulary.tokens
    usable = {tokens[id] for id in vocabulary.of_type(_NORMAL, _USER, _UNUSED)}
    by_id = vocabulary.metadata.architecture.startswith("gemma")
    ordered = sorted(usable, key=lambda t: (0 if by_id else -vocabulary.scores[ids[t]], ids[t]))
    short = (token for token in ordered if len(token) <= _LONGEST_MERGED)
    cuts = ((token[:cut], token[cut:]) for token in short for cut in range(1, len(token)))
    return [(left, right) for left, right in cuts if left in usable and right in usable]


def _finish(tokenizer: Any, vocabulary: _Vocabulary, *, begins: bool, ends: bool) -> Any:
    """Add special tokens, and the template that puts BOS and EOS around a prompt. begins, ends:
    Whether a prompt has BOS and EOS by default."""
    from tokenizers import AddedToken, processors

    tokens = vocabulary.tokens
    controls = {*vocabulary.special.values(), *vocabulary.of_type(_CONTROL, _UNKNOWN)}
    added = (id for id in sorted({*controls, *vocabulary.of_type(_USER)}) if tokens[id])
    tokenizer.add_tokens(
        [AddedToken(tokens[id], special=id in controls, normalized=False) for id in added]
    )

    def around(name: str, default: bool) -> dict[str, int]:
        if name in vocabulary.special and vocabulary.get(f"add_{name}_token", bool, default):
            return {tokens[vocabulary.special[name]]: vocabulary.special[name]}
        return {}

    first, last = around("bos", begins), around("eos", ends)
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=[*first.items(), *last.items()]
        )
    return tokenizer
