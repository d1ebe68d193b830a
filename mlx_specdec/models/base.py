"""What models of both families have beyond interfaces.TargetModel, and what they refuse."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..errors import OptionError, PromptError, RewindError
from ..interfaces import TargetModel, after
from ..text.tokenizer import Kind
from ..version import __version__
from .cache_settings import CacheSettings


class Base(TargetModel, Protocol):
    """A loaded model with its modules."""

    @property
    def kind(self) -> Kind:
        """Whether an encoder reads the prompt."""

    @property
    def network(self) -> nn.Module:
        """The modules, whose parameters are named as in checkpoints."""

    @property
    def identity(self) -> str | None:
        """What `identity_of` gives; None where the model was not loaded from files, or is
        shared by ranks."""

    @property
    def rows_agree(self) -> bool:
        """Whether a pass over several rows computes what passes over single rows compute, on which
        speculation rests. Where not, a RuntimeWarning says so once."""

    @property
    def why_not_exact(self) -> str:
        """Why `Options.exact` is impossible for this model, as the end of an error message; "" if
        it is possible."""

    def cache_nbytes(self, source: int, columns: int) -> int:
        """Bytes of a sequence's keys, values and recurrent state with `columns` tokens in the
        cache, and in an encoder-decoder model of an encoded source of `source` tokens."""

    @property
    def holds_scores(self) -> bool:
        """Whether a pass over a prompt holds the attention scores of all its rows and keys in
        memory, so that it should have few rows."""

    def reading_nbytes(self, prompt: int, step: int) -> int:
        """About the working memory, without caches, of reading a prompt of `prompt` tokens, `step`
        of them in one pass; an encoder reads them all."""

    def caution(self, prompt_tokens: int) -> str:
        """A warning about a prompt of this length, mostly "". Raises PromptError where there is not
        enough memory to read it."""


def identity_of(
    config: Mapping[str, Any],
    dtype: str,
    caches: CacheSettings | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> str:
    """Return a digest of what the passes of a model depend on besides its weights. config, adapter:
    the contents of config.json and adapter_config.json. dtype: in words."""
    versions = __version__, version("mlx"), version("mlx-lm"), str(mx.default_device())
    parts = json.dumps([config, dtype, repr(caches), adapter, *versions], sort_keys=True)
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def check_prompt(prompt: Sequence[int], vocabulary: int, longest: int | None) -> None:
    """Raise PromptError for what `interfaces.Model.open` refuses."""
    if not prompt:
        raise PromptError("the prompt is empty: give at least one token")
    if longest is not None and len(prompt) > longest:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the model takes {longest}: shorten it"
        )
    # MLX reads past the embedding table without a word.
    strange = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise PromptError(
            f"token id {strange} of the prompt is not among the model's {vocabulary}: give ids "
            "below that; if the prompt is a text, the tokenizer belongs to another model"
        )


def check_pass(tokens: mx.array, proposed: int, batch: int) -> int:
    """Return how many rows a pass over `batch` sequences has. Raises ValueError."""
    if tokens.ndim != 2 or tokens.shape[0] != batch:
        raise ValueError(f"the context takes tokens of shape ({batch}, m), not {tokens.shape}")
    rows = tokens.shape[1]
    if rows < 1 or not 0 <= proposed <= rows:
        raise ValueError(f"{proposed} proposed of {rows} tokens: need 0 <= proposed <= m, m >= 1")
    return rows


def check_rewind(lengths: tuple[int, ...], final: Sequence[int], seen: Sequence[int]) -> None:
    """Raise RewindError for lengths that are not between the final ones and those seen."""
    if len(lengths) != len(seen):
        raise RewindError(f"the context takes {len(seen)} lengths, not {len(lengths)}")
    for length, least, most in zip(lengths, final, seen, strict=True):
        if not least <= length <= most:
            raise RewindError(
                f"cannot go to {length} tokens: {most} were seen and {least} are final"
            )


def layer_of(name: str, layers: int) -> int:
    """The layer whose output is called `name`. Raises OptionError where there is none."""
    number = name.removeprefix("after.")
    if name.startswith("after.") and number.isdecimal() and int(number) < layers:
        return int(number)
    raise OptionError(
        f"the model has no hidden state {name!r}: it has 'final' and "
        f"{after(0)!r} to {after(layers - 1)!r}"
    )
