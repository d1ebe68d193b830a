"""Conversion of vocabularies to tokenizer.json and tokenizer_config.json, from the metadata of a
GGUF file or from Meta's tokenizer.model, which has SentencePiece's or tiktoken's format."""

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import first_line
from ..disk import reading
from ..tensors import Malformed, naming
from .gguf_header import Metadata

PLAIN = "default"
"""llama.cpp's name of the rule for files that name none."""


@dataclass(frozen=True)
class SplitRule:
    """How a byte-level tokenizer splits text into pieces before merging.

    Attributes:
        split: The pattern of the pieces, "" for none.
        then_gpt2: Whether GPT-2's pattern splits the pieces again.
        ignores_merges: Whether a piece that is a token stays whole, without merging.
        composes: Whether text is normalized to NFC.
        begins: Whether prompts begin with BOS by default.
    """

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

RULES: Mapping[str, SplitRule] = {
    name: rule
    for names, rule in (
        (f"{PLAIN} gpt-2 phi-2 mpt olmo", SplitRule(then_gpt2=True)),
        ("smollm starcoder refact", SplitRule(r"\p{N}", then_gpt2=True)),
        ("command-r", SplitRule(r"\p{N}", then_gpt2=True, composes=True)),
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            SplitRule(_BY_THREE, ignores_merges=True, begins=True),
        ),
        ("dbrx smaug-bpe", SplitRule(_BY_THREE)),
        ("qwen2 deepseek-r1-qwen megrez", SplitRule(_BY_ONE, composes=True)),
        ("stablelm2", SplitRule(_BY_ONE)),
        ("tekken", SplitRule(_TEKKEN, ignores_merges=True, begins=True)),
        ("gpt-4o llama4 kanana2", SplitRule(_GPT4O)),
    )
    for name in names.split()
}
"""llama.cpp's name -> the rule."""

ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<eos>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|return|>", "<|call|>", "<｜end▁of▁sentence｜>"),
)
"""Names of control tokens that always end a sequence in llama.cpp."""
_RETURN, _END = "<|return|>", "<|end|>"
"""If a vocabulary has the first, the second ends a message but not the sequence."""
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_PREFIX = "tokenizer.ggml."
_LONGEST_MERGED = 256
"""Longest token, in characters, whose merges are reconstructed. The time is quadratic in it."""
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""llama.cpp's name of a special token -> Hugging Face's name."""
_PUT_BESIDE = "put the model's tokenizer.json beside it"
_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


class _Vocabulary:
    """The tokens of a GGUF file by id, with types and scores. ids: Token -> the first id. special:
    Name in _SPECIAL -> id."""

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
        names = [name for name in _SPECIAL if f"{_PREFIX}{name}_token_id" in metadata]
        self.special = {name: self.get(f"{name}_token_id", int) for name in names}

    def get(self, key: str, *rest: Any) -> Any:
        return self.metadata.get(f"{_PREFIX}{key}", *rest)

    def of_type(self, *types: int) -> list[int]:
        return [id for id, kind in enumerate(self.types) if kind in types]


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """Return the content of tokenizer.json and tokenizer_config.json by name, {} without a
    vocabulary. Raises Malformed."""
    kind = metadata.get(f"{_PREFIX}model", str, "none")
    builders = {"llama": _sentencepiece_bpe, "t5": _unigram, "gpt2": _byte_bpe}
    if kind in ("none", "no_vocab"):
        return {}
    if kind not in builders:
        unknown = f"has a vocabulary of the kind {kind!r:.40}, which is not read here"
        raise Malformed(f"{unknown}: {_PUT_BESIDE}")
    vocabulary = _Vocabulary(metadata)
    with _library_errors():
        tokenizer = builders[kind](vocabulary)
        tokenizer.encode("a b")
        made = str(tokenizer.to_str(pretty=False))
    settings: dict[str, Any] = dict(_SETTINGS)
    for name, id in vocabulary.special.items():
        settings[f"{_SPECIAL[name]}_token"] = vocabulary.tokens[id]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata.get("tokenizer.chat_template", str)
    return _files(made, settings)


def ends_by_name(metadata: Metadata) -> list[int]:
    """Return the ids of the control tokens with a name in ENDS. Raises Malformed."""
    tokens = metadata.get(f"{_PREFIX}tokens", list, [])
    types = metadata.get(f"{_PREFIX}token_type", np.ndarray, np.zeros(0))[: len(tokens)]
    controls = {tokens[id]: int(id) for id in np.flatnonzero(types == _CONTROL)}
    names = (name for name in ENDS if name != _END or _RETURN not in controls)
    return [controls[name] for name in names if name in controls]


def _files(tokenizer: str, settings: Mapping[str, Any]) -> dict[str, str]:
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": json.dumps(settings, indent=2)}


@contextmanager
def _library_errors() -> Iterator[None]:
    """Turn errors of `tokenizers` into Malformed. PanicException is not a subclass of Exception."""
    try:
        yield
    except (Malformed, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as problem:
        reason = first_line(problem)
        raise Malformed(f"has a damaged vocabulary ({reason:.100}): download it again") from None


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

    name = vocabulary.get("pre", str, PLAIN)
    rule = RULES.get(name)
    if rule is None:
        unknown = f"splits text by the rule {name!r:.40}, which is not known here"
        raise Malformed(f"{unknown}: {_PUT_BESIDE}")
    ids = vocabulary.ids
    pairs = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges", list, [])]
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=rule.ignores_merges))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(rule.split), "isolated")] if rule.split else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.then_gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, vocabulary, begins=rule.begins, ends=False)


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


MODEL = "tokenizer.model"
LONGEST = 256
"""Most bytes of a token. The time to find the merges of a token is quadratic in this length."""
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+")
_SPECIAL_TOKENS = 256
_NAMED_3 = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id"}
_NAMED_3[9] = "eot_id"
_NAMED_31 = {**_NAMED_3, 4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}
"""Position among Llama 3's special tokens -> name. The other tokens are reserved."""
_ADVICE = "take the one that belongs to the model"
_TRIAL = "Once upon a time, a girl said: I don't  know!\n\n\t3.14 ünïcödé ﬁ 漢字 🙂 f(x):\n    x"


def read_tokenizer(
    file: Path, vocabulary: int, *, since_31: bool = False
) -> tuple[dict[str, str], dict[str, Any]]:
    """Convert Meta's tokenizer.model. Return the content of Hugging Face's files by name, and the
    entries of config.json for BOS and EOS. Raises CheckpointError.

    vocabulary: The largest number of tokens. since_31: Whether special tokens have the names of
    Llama 3.1 instead of 3.
    """
    with naming(file), reading(file):
        data = file.read_bytes()
        if _LINE.fullmatch(data.split(b"\n", 1)[0].strip()):
            files, ids = _tiktoken(data, vocabulary, since_31=since_31)
        else:
            files, ids = _sentencepiece(data, vocabulary)
    return {**files, "generation_config.json": json.dumps(ids, indent=2)}, ids


def _sentencepiece(data: bytes, vocabulary: int) -> tuple[dict[str, str], dict[str, Any]]:
    import sentencepiece
    from tokenizers import Tokenizer

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
        size = processor.get_piece_size()
        if size > vocabulary:
            raise Malformed(f"has {size} tokens where the model knows {vocabulary}: {_ADVICE}")
        metadata = Metadata(_described(processor))
        expected = processor.encode(_TRIAL)
    # A damaged file may load, and then have tokens that are not text, or ids out of range.
    except (RuntimeError, OSError, ValueError, LookupError):
        raise Malformed("is neither SentencePiece's nor tiktoken's, or damaged") from None
    files = tokenizer_files(metadata)
    made = Tokenizer.from_str(files["tokenizer.json"])
    if made.encode(_TRIAL, add_special_tokens=False).ids != expected:
        raise Malformed(f"cuts text in a way that tokenizer.json cannot say: {_ADVICE}")
    ends = {"bos": processor.bos_id(), "eos": processor.eos_id()}
    return files, {f"{name}_token_id": id for name, id in ends.items() if id >= 0}


def _described(processor: Any) -> dict[str, Any]:
    """Return a SentencePiece vocabulary in the form of a GGUF file's metadata."""
    every = range(processor.get_piece_size())
    kinds = {_UNKNOWN: processor.is_unknown, _CONTROL: processor.is_control}
    kinds |= {_UNUSED: processor.is_unused, _BYTE: processor.is_byte}
    types = [next((n for n, kind in kinds.items() if kind(id)), _NORMAL) for id in every]
    ids = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unknown": processor.unk_id()}
    spaced = processor.encode("x  x", out_type=str)
    values = {
        "model": "llama",
        "tokens": [processor.id_to_piece(id) for id in every],
        "scores": np.array([processor.get_score(id) for id in every]),
        "token_type": np.array(types),
        "add_space_prefix": spaced[0].startswith(_SPACE),
        "remove_extra_whitespaces": 2 * _SPACE not in "".join(spaced),
        **{f"{name}_token_id": id for name, id in ids.items() if id >= 0},
    }
    named = {f"{_PREFIX}{name}": value for name, value in values.items()}
    return {"general.architecture": "llama", **named}


def _tiktoken(
    data: bytes, vocabulary: int, *, since_31: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    ranks = _ranks(data)
    count, named = len(ranks), _NAMED_31 if since_31 else _NAMED_3
    if vocabulary - count < _SPECIAL_TOKENS:
        counted = f"has {count} tokens and 256 more where the model has {vocabulary}"
        raise Malformed(f"{counted}: {_ADVICE}")
    free = iter(range(_SPECIAL_TOKENS))
    special = [
        f"<|{named[place]}|>" if place in named else f"<|reserved_special_token_{next(free)}|>"
        for place in range(_SPECIAL_TOKENS)
    ]
    settings = {**_SETTINGS, "bos_token": special[0], "eos_token": special[1]}
    ends = [count + end for end in ([1, 8, 9] if since_31 else [1, 9])]
    ids = {"bos_token_id": count, "eos_token_id": ends}
    return _files(_tiktoken_json(ranks, special), settings), ids


def _ranks(data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for rank, line in enumerate(line.strip() for line in data.splitlines() if line.strip()):
        encoded, _, stated_rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True) if _LINE.fullmatch(line) else b""
        except binascii.Error:
            token = b""
        if not 0 < len(token) <= LONGEST or token in ranks or stated_rank != b"%d" % rank:
            raise Malformed(f"is damaged in its line {rank + 1}: {_ADVICE}")
        ranks[token] = rank
    if not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise Malformed("is damaged: it lacks tokens of single bytes")
    return ranks


def _tiktoken_json(ranks: dict[bytes, int], special: list[str]) -> str:
    """Return the content of tokenizer.json. special: The tokens after `ranks`, BOS first."""
    # Without torch, importing transformers would log a warning.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from tokenizers import processors
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks  # reading the file would need tiktoken

    with _library_errors():
        tokenizer = Converter(extra_special_tokens=special).converted()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[special[0], "$A"], special_tokens=[(special[0], len(ranks))]
        )
        return str(tokenizer.to_str(pretty=False))
