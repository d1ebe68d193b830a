"""Tiny pairs with every kind of cache and of drafter, whose tokens are letters.

A grammar can bind their completions, stop strings fall between their tokens, and some tokens are
single bytes of a character."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_specdec import CacheSettings, load

from ..support import medusa_files, mtp, tiny
from ..support.speculators import MAKERS
from .support import ROOT, moved

FIXTURES = ROOT / "tests" / "fixtures"
SPECIAL = ("<unk>", "</s>", "<stop>")
END = 1
LETTERS = 'abcdefgh0123456789{}[]":, \nijklmnopqrstuvwxyzABCD'
LONGER = ("ab", "ba", "abc", '": ', '{"', "12")
SIZE = 64
"""The number of tokens: those above, and the bytes of é and of an emoji."""
Make = Callable[[Path], Any]
"""Writes models into a directory and loads them."""
Pairs = Callable[[str], Any]
"""Returns a pair by its name, as the fixture `pairs` does."""


def letters(
    directory: Path, alphabet: str = LETTERS + "é🙂", longer: tuple[str, ...] = LONGER
) -> Path:
    """Write a tokenizer of single bytes and of some words."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(pieces, _)] = byte_level.pre_tokenize_str(alphabet)
    vocabulary = {piece: id for id, piece in enumerate([*SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in longer])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[END]}))
    return directory


def model(directory: Path, name: str, seed: int = 0, **config: Any) -> Path:
    """Write a model of a family of tests/support/tiny.py, or of a directory in tests/fixtures."""
    if name in tiny.CONFIGS:
        tiny.write(name, directory, seed, **config)
    else:
        shutil.copytree(FIXTURES / name, directory, dirs_exist_ok=True)
    return letters(directory)


def drafted(name: str, caches: CacheSettings | None = None, **config: Any) -> Make:
    """Return the recipe of a model and a draft model that is similar."""

    def make(home: Path) -> Any:
        target = model(home / "target", name, **config)
        return load(target, moved(target, home / "draft"), caches=caches)

    return make


def by_another(name: str, draft: str, draft_vocab: str = "same", **config: Any) -> Make:
    """Return the recipe of a model and a draft model of another architecture or vocabulary."""
    return lambda home: load(
        model(home / "target", name),
        model(home / "draft", draft, **config),
        draft_vocab=draft_vocab,
    )


def width_of(directory: Path) -> int:
    """Return the width of a model's hidden states."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config") or config.get("decoder") or config
    width: int = config.get("d_model") or config["hidden_size"]
    return width


def hidden_states(kind: str, name: str = "llama", attending: bool = False) -> Make:
    """Return the recipe of a model and a drafter that reads its hidden states. attending: Whether
    the drafter also attends to the output of the model's encoder."""

    def make(home: Path) -> Any:
        target = model(home / "target", name)
        width = width_of(target)
        sizes = {"width": width, "encoder": width} if attending else {"width": width}
        return load(target, MAKERS[kind](home / "drafter", **sizes))

    return make


def headed(name: str, own_output: bool) -> Make:
    """Return the recipe of a model with Medusa heads."""

    def make(home: Path) -> Any:
        width = width_of(model(home / "base", name))
        size = SIZE if own_output else None
        return load(medusa_files.write(home / "heads", "../base", width=width, vocabulary=size))

    return make


def own_layers(name: str) -> Make:
    """Return the recipe of a model with layers for multi-token prediction."""
    return lambda home: load(letters(mtp.write(name, home)))


T5, T5GEMMA = "t5/own-head-scaled", "t5gemma2/grouped"
PAIRS: dict[str, Make] = {
    **{
        name: drafted(name)
        for name in (
            *("llama", "gemma3_wrapped", "llama_sliding", "llama4", "deepseek_v3"),
            *("mamba2", "qwen3_next", "falcon_h1", "recurrent_gemma", T5, T5GEMMA),
            *("bart/bart", "bart/m2m100", "bart/marian-two-vocabularies"),
        )
    },
    "llama, 2 bits": drafted("llama", CacheSettings(2, 32), head_dim=32),
    "qwen3, newest 9": drafted("qwen3", CacheSettings(max_size=9)),
    "llama by mamba2": by_another("llama", "mamba2"),
    "llama by fewer tokens": by_another("llama", "llama", "intersect", vocab_size=40),
    "llama, own heads": headed("llama", own_output=True),
    "gemma3_wrapped, tied heads": headed("gemma3_wrapped", own_output=False),
    "t5, tied heads": headed(T5, own_output=False),
    **{f"llama, {kind}": hidden_states(kind) for kind in MAKERS if kind != "dflash"},
    "gemma3_wrapped, eagle3": hidden_states("eagle3", "gemma3_wrapped"),
    "qwen3_next, dspark": hidden_states("dspark", "qwen3_next"),
    "t5gemma2, mtp": hidden_states("mtp", T5GEMMA),
    "bart, dflash": hidden_states("dflash", "bart/bart"),
    "t5, attending dspark": hidden_states("dspark", T5, attending=True),
    "qwen3_5, own layers": own_layers("qwen3_5"),
    "glm4_moe, own layers": own_layers("glm4_moe"),
    "gemma4, assistant": lambda home: load(
        model(home, "gemma4_assistant/ordered/target"),
        FIXTURES / "gemma4_assistant/ordered/assistant",
    ),
}
