"""The protocol of models whose modules are accessible, checks that all models share, and networks
that can be trained. A training pass runs over complete sequences of different lengths without
caches. Padding follows a sequence, and causal attention never looks ahead at it."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..errors import OptionError, PromptError
from ..text.tokenizer import Kind
from ..types import Model, after
from ..version import __version__
from .cache_settings import OWN_CACHES, CacheSettings
from .exact import ExactPasses
from .number_format import NumberFormat


class Base(Model, Protocol):
    """A loaded model of either family, with its modules.

    Attributes:
        kind: Whether an encoder reads the prompt.
        family: Name of the module that defines `network`, such as "llama".
        identity: The digest that `identity_of` returns; None if the model was not loaded from files
            or is shared by ranks.
        source_vocabulary: Number of token ids that a prompt may have, if it is not `vocabulary`.
        lost: Whether ranks that share the model are out of step, so that nothing can go on.
    """

    kind: Kind
    family: str
    identity: str | None
    source_vocabulary: int | None
    lost: bool

    @property
    def network(self) -> nn.Module:
        """The modules, whose parameters are named as in checkpoints."""

    @property
    def rows_agree(self) -> bool:
        """Whether a pass over several rows computes the same as passes over single rows.
        Speculative decoding needs this. If it is False, a RuntimeWarning says so once."""

    @property
    def exact(self) -> ExactPasses:
        """How `Options.exact` computes passes of this model. A trial finds it out when it is first
        read."""

    @property
    def holds_scores(self) -> bool:
        """Whether prefill holds the attention scores of all rows and keys of a pass in memory, so
        that a pass should have few rows."""

    def reaching(self, length: int) -> "Base":
        """Return the model for sequences of at most `length` tokens. It shares the weights with
        this model. It is another object if rotary factors depend on the length of a sequence; then
        caches of the two must not be mixed."""

    def cache_nbytes(self, source: int, positions: int) -> int:
        """Return the bytes of a sequence's keys, values and recurrent state with `positions` tokens
        in the cache. In an encoder-decoder model, add the bytes of a source of `source` tokens."""

    def prefill_nbytes(self, prompt: int, step: int) -> int:
        """Estimate the bytes that prefill of `prompt` tokens takes in addition to the caches, with
        `step` tokens per pass. An encoder processes all tokens in one pass."""

    def capture(self, name: str) -> Any:
        """Prepare to return the hidden state `name`. Raises OptionError if the model lacks it."""

    def caution(self, prompt_tokens: int) -> str:
        """Return a warning about a prompt of this length, mostly ""."""


@dataclass(frozen=True)
class LoadSettings:
    """The settings with which a family loads a model; see `loading.load_model`."""

    numbers: NumberFormat
    caches: CacheSettings = OWN_CACHES
    adapter: Path | None = None
    group: mx.distributed.Group | None = None
    pipeline: bool = False


def family_of(network: nn.Module) -> str:
    """Return the name of the module that defines a network."""
    return type(network).__module__.rpartition(".")[2]


def identity_of(
    config: Mapping[str, Any],
    dtype: str,
    caches: CacheSettings = OWN_CACHES,
    adapter: Mapping[str, Any] | None = None,
) -> str:
    """Return a digest of everything but the weights that a model's passes depend on: config.json,
    the dtype in words, the settings of the KV cache, and adapter_config.json."""
    versions = __version__, version("mlx"), version("mlx-lm"), str(mx.default_device())
    parts = json.dumps([config, dtype, repr(caches), adapter, *versions], sort_keys=True)
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def check_prompt(prompt: Sequence[int], vocabulary: int, longest: int | None) -> None:
    """Raise PromptError for a prompt that `types.Model.open_batch` refuses."""
    if not prompt:
        raise PromptError("the prompt is empty: give at least one token")
    if longest is not None and len(prompt) > longest:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the model takes {longest}: shorten it"
        )
    # MLX does not check indices into the embedding table.
    invalid = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if invalid is not None:
        raise PromptError(
            f"token id {invalid} of the prompt is not among the model's {vocabulary}: give ids "
            "below that; if the prompt is a text, the tokenizer belongs to another model"
        )


def layer_of(name: str, layers: int) -> int:
    """Return the number of the layer whose output is the hidden state `name`, such as "after.3".
    Raises OptionError if there is no such layer."""
    number = name.removeprefix("after.")
    if name.startswith("after.") and number.isdecimal() and int(number) < layers:
        return int(number)
    raise OptionError(
        f"the model has no hidden state {name!r}: it has 'final' and "
        f"{after(0)!r} to {after(layers - 1)!r}"
    )


_SAMPLED = 64
"""A model's fingerprint has this many numbers of each array of weights."""


def fingerprint(network: nn.Module) -> str:
    """Return a digest of a sample of numbers from every array of weights."""
    digest = hashlib.blake2b(digest_size=16)
    weights = sorted(tree_flatten(network.parameters()))
    samples = []
    for _, array in weights:
        places = [(array.size - 1) * place // (_SAMPLED - 1) for place in range(_SAMPLED)]
        samples.append(mx.take(array, mx.array(places, dtype=mx.int64)))
    mx.eval(samples)
    for (name, array), sample in zip(weights, samples, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype} {sample.tolist()}".encode())
    return digest.hexdigest()


Ids = Sequence[int]
"""Token ids of a sequence."""


@dataclass(frozen=True)
class Trainable:
    """A network that can be trained on prompts and their completions.

    Attributes:
        inputs: Returns the arguments of `logits` for prompts and the completions after them. None
            of them may be empty.
        logits: Returns the logits that predict each token of all completions, one completion after
            the other, (rows, vocabulary).
    """

    network: nn.Module
    inputs: Callable[[Sequence[Ids], Sequence[Ids]], tuple[mx.array, ...]]
    logits: Callable[..., mx.array]


def places(spans: Sequence[tuple[int, int]], width: int) -> np.ndarray:
    """Return indices into a flattened (sequences, width) array. They select, one sequence after the
    other, the positions begin .. end - 1 of the sequence's span."""
    parts = [np.arange(a, b) + row * width for row, (a, b) in enumerate(spans)]
    return np.concatenate(parts).astype(np.int32)
