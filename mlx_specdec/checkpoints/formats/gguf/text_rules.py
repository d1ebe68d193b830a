"""How byte-level vocabularies split text before they merge, by llama.cpp's names. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PLAIN = "default"


@dataclass(frozen=True)
class Rule:
    """splits: patterns, each of whose matches stands by itself. then_gpt2: GPT-2's own pattern
    comes after them. ignores_merges: a piece that is a token is one whatever the merges say.
    composes: text is brought to NFC. begins: a prompt begins with a token of its own unless the
    file denies it."""

    splits: tuple[str, ...] = ()
    then_gpt2: bool = False
    ignores_merges: bool = False
    composes: bool = False
    begins: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_THREE = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}"
_BY_ONE = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}"

_GPT2 = Rule(then_gpt2=True)
_LLAMA3 = Rule((_BY_THREE,), ignores_merges=True, begins=True)
_DIGITS = Rule((r"\p{N}",), then_gpt2=True)
_QWEN2 = Rule((_BY_ONE,), composes=True)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_BY_CASE = f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
_TEKKEN = Rule(
    (rf"{_BY_CASE}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    ignores_merges=True,
    begins=True,
)

RULES: Mapping[str, Rule] = {
    PLAIN: _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "dbrx": Rule((_BY_THREE,)),
    "smaug-bpe": Rule((_BY_THREE,)),
    "tekken": _TEKKEN,
    "falcon3": _LLAMA3,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
}
