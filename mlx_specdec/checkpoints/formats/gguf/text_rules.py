"""How byte-level vocabularies split text before they merge, by llama.cpp's names. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_REST_WITH_SLASH = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
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
