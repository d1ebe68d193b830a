"""Which of a repository's files are a model."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ...errors import SourceError
from .. import mtp_layers, shards
from ..formats.medusa import SAFETENSORS, TORCH

_PLAIN = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,254}")
_BESIDE = re.compile(
    r"(?!.*\.index\.).*(\.json|\.tiktoken|\.jinja)"
    r"|spiece\.model|tokenizer\.model|vocab\.txt|merges\.txt"
)
"""Small files: configuration and tokenizer."""


@dataclass(frozen=True)
class Choice:
    """beside: small files. index: of the weights; None where their names are known without one.
    weights: the names that are known; those that an index names are not among them."""

    beside: tuple[str, ...]
    index: str | None
    weights: tuple[str, ...]


def choose(name: str, files: Collection[str]) -> Choice:
    """What to fetch of the repository `name`. files: its paths, as the Hub lists them. Raises
    SourceError where there are no weights, or several models."""
    plain = sorted(file for file in files if _PLAIN.fullmatch(file))
    heads = [file for file in (SAFETENSORS, TORCH) if file in plain][:1]
    alone = [*heads, *(file for file in plain if file == mtp_layers.FILE)]
    # Of the rest mlx-lm reads none: adapters, and Mistral's own layout.
    ours = [file for file in plain if re.match(r"model|(?!.*\.safetensors$)", file)]
    chosen = shards.choose(ours)
    weights = chosen.names if chosen else ()
    if not weights and not alone:
        raise SourceError(_no_weights(name, plain))
    if chosen and chosen.format == "gguf" and len(several := shards.models(weights)) > 1:
        raise SourceError(
            f"{name} holds {len(several)} models in GGUF: fetch one, as in `hf download {name} "
            f"{weights[0]}`, and give the path of its file"
        )
    index = chosen.index if chosen else None
    beside = tuple(file for file in plain if _BESIDE.fullmatch(file))
    return Choice(beside, index, (*(() if index else weights), *alone))


def _no_weights(name: str, files: Collection[str]) -> str:
    sentence = f"{name} holds no weights that can be read here"
    if other := shards.foreign([file for file in files if file.isprintable()]):
        sentence += f", only such as {other:.80}"
    return f"{sentence}: choose a repository with safetensors files"
