"""Any decoder-only model that mlx-lm implements, as a Model with rewindable contexts.

Knows mlx-lm's classes and loader. Knows nothing of text, proposals or rules. Importing this module
imports mlx-lm and with it transformers (about a second): import it when such a model is wanted.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from ..contracts import Progress, Scores
from ..errors import CheckpointError, OptionError, PromptError, RewindError
from .rewinding import RewindableCache, evaluate

PREFILL_STEP = 512
"""Prompt tokens in one pass: what mlx-lm uses; more only costs memory."""


class _Tap:
    """Keeps what a module returns, for one call after `arm`.

    The instance gets a subclass of its own class, so its parameters, its name in the model and
    whatever else is said about it stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._armed = False
        self._kept: Any = None
        plain = type(module)

        def call(inner: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain.__call__(inner, *args, **kwargs)
            if self._armed:
                self._kept, self._armed = result, False
            return result

        module.__class__ = type(plain.__name__, (plain,), {"__call__": call})

    def arm(self) -> None:
        """The next result is kept."""
        self._armed, self._kept = True, None

    def take(self) -> Any:
        """The kept result, which is then let go; None where the module was not called."""
        kept, self._kept, self._armed = self._kept, None, False
        return kept


def _inner(model: nn.Module) -> nn.Module:
    """The module whose result the output head is given, through any multimodal wrapper."""
    outer = _innermost(model)
    children = (getattr(outer, name, None) for name in ("model", "transformer", "backbone"))
    return _innermost(next((c for c in children if isinstance(c, nn.Module)), outer))


def _innermost(module: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(module, "language_model", None), nn.Module):
        module = inner
    return module


class DecoderOnlyModel:
    """A Model over an mlx-lm model.

    model: the loaded module, called as `model(tokens, cache=entries)`.
    max_length: longest committed text in tokens, or None.
    """

    def __init__(self, model: nn.Module, max_length: int | None = None) -> None:
        self._model = model
        self._max_length = max_length
        self._tap: _Tap | None = None
        # Shapes are known as soon as the graph is built; nothing is computed here.
        probe = model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(model))
        self._vocabulary: int = probe.shape[-1]

    @property
    def vocabulary(self) -> int:
        """Width of the logits, padding included."""
        return self._vocabulary

    @property
    def max_length(self) -> int | None:
        """Longest committed text in tokens, prompt included; None where there is no hard limit."""
        return self._max_length

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(array.nbytes for _, array in tree_flatten(self._model.parameters()))

    def prefix(self, prompt: Sequence[int]) -> list[int]:
        """The prompt itself."""
        return list(prompt)

    def open(self, prompt: Sequence[int], progress: Progress | None = None) -> DecoderOnlyContext:
        """A context that has seen all of `prompt` but its last token, in steps of PREFILL_STEP.

        `progress` counts those tokens. Raises PromptError for a prompt that is empty, longer than
        `max_length`, or that holds an id outside of the vocabulary.
        """
        self._check_prompt(prompt)
        context = DecoderOnlyContext(self, make_prompt_cache(self._model))
        context.prefill(prompt[:-1], progress)
        return context

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise PromptError("the prompt is empty: give at least one token")
        if self._max_length is not None and len(prompt) > self._max_length:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and the model takes {self._max_length}: "
                "shorten it"
            )
        # mlx reads past the embedding table without a word.
        strange = next((t for t in prompt if not 0 <= t < self._vocabulary), None)
        if strange is not None:
            raise PromptError(
                f"token id {strange} of the prompt is not among the model's {self._vocabulary}: "
                "the tokenizer belongs to another model"
            )

    def run(self, tokens: mx.array, entries: list[Any], tap: _Tap | None = None) -> Scores:
        """One pass over `tokens` (1, m) int32, which `entries`, the caches, remember."""
        if tap is None:
            return Scores(self._model(tokens, cache=entries))
        tap.arm()
        logits = self._model(tokens, cache=entries)
        return Scores(logits, {"final": tap.take()})

    def tap(self, names: Sequence[str]) -> _Tap | None:
        """What `run` needs to return these hidden states; the model is prepared on the first call.

        Raises ValueError for a name other than "final", and where a model has no such state.
        """
        unknown = [name for name in names if name != "final"]
        if unknown:
            raise ValueError(f"unknown hidden state {unknown[0]!r}: this model has 'final'")
        return self._final() if names else None

    def _final(self) -> _Tap:
        if self._tap is None:
            tap = _Tap(_inner(self._model))
            tap.arm()
            self._model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(self._model))
            seen = tap.take()
            # Some models keep the head inside: what comes out of them are logits.
            if not isinstance(seen, mx.array) or seen.shape[-1] == self._vocabulary:
                kind = type(self._model).__module__.rpartition(".")[2]
                raise ValueError(f"models of type {kind} do not show the input of their head")
            self._tap = tap
        return self._tap


class DecoderOnlyContext:
    """One sequence in one mlx-lm model.

    model: whose passes these are. entries: empty caches, one a layer, owned from here on.
    """

    def __init__(self, model: DecoderOnlyModel, entries: list[Any]) -> None:
        self._model = model
        self._cache = RewindableCache(entries)
        self._final = 0
        # Tokens since `_since` that a replay may need.
        self._undecided: list[mx.array] = []
        self._since = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen, rewound ones not counted."""
        return (self._cache.length,)

    @property
    def replays(self) -> bool:
        """Whether a rewind into a pass of several tokens costs another pass over the kept ones."""
        return self._cache.replays

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        """See `tokens` (1, m) int32, the last `proposed` of which may be taken back.

        Raises ValueError for more than one sequence, no tokens, a `proposed` outside of 0 .. m, or
        a hidden state that is not "final".
        """
        rows = _rows(tokens, proposed)
        tap = self._model.tap(taps) if taps else None
        start = self._cache.length
        self._cache.before_pass(rows, proposed)
        scores = self._model.run(tokens, self._cache.entries, tap)
        if proposed < rows:
            self._final = start + rows - proposed
            self._undecided, self._since = [], start
        elif not self._undecided:
            self._since = start
        if proposed and self._cache.replays:
            self._undecided.append(tokens)
        return scores

    def rewind(self, lengths: tuple[int, ...]) -> None:
        """Forget all but the first `lengths` tokens; what stays is final.

        Where the caches can only go further back, the kept tokens are fed again, without waiting
        for it. Raises RewindError for lengths outside of what is final and what was seen, and where
        a cache does not hold the right number of tokens afterwards.
        """
        if len(lengths) != 1:
            raise RewindError(f"this context holds one sequence and {len(lengths)} lengths came")
        length, seen = lengths[0], self._cache.length
        if not self._final <= length <= seen:
            raise RewindError(
                f"cannot go to {length} tokens: {seen} were seen and {self._final} are final"
            )
        reached = self._cache.rewind(length)
        if reached < length:
            tokens = mx.concatenate(self._undecided, axis=1)
            kept = tokens[:, reached - self._since : length - self._since]
            self._cache.before_pass(length - reached, 0)
            self._model.run(kept, self._cache.entries)
            # The device works on it while the host builds the next proposal; without logits.
            mx.async_eval(self._cache.state)
        self._final, self._undecided, self._since = length, [], length

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """See a long text in steps, computing each before the next one is built."""
        total = len(tokens)
        if progress is not None:
            progress(0, total)
        for start in range(0, total, PREFILL_STEP):
            step = tokens[start : start + PREFILL_STEP]
            self.advance(mx.array([step], dtype=mx.int32))
            evaluate(self._cache)
            if progress is not None:
                progress(start + len(step), total)


def _rows(tokens: mx.array, proposed: int) -> int:
    if tokens.ndim != 2 or tokens.shape[0] != 1:
        raise ValueError(
            f"a context holds one sequence, tokens of shape (1, m); these have {tokens.shape}"
        )
    rows = tokens.shape[1]
    if rows < 1 or not 0 <= proposed <= rows:
        raise ValueError(f"{proposed} proposed of {rows} tokens: need 0 <= proposed <= m, m >= 1")
    return rows


def load_decoder_only(
    directory: Path,
    config: Mapping[str, Any],
    *,
    dtype: str = "auto",
    q_bits: int | None = None,
    q_group_size: int = 64,
) -> tuple[DecoderOnlyModel, tuple[int, ...], str]:
    """Loads a directory that mlx-lm can read: config.json and model*.safetensors.

    config: the contents of config.json. dtype: float32, float16, bfloat16, or auto: float32 where
    an unquantised model runs on the CPU, whose half precision is slower, otherwise as stored.
    q_bits: quantise the weights after loading, in groups of q_group_size, the layers that mlx-lm's
    converter would quantise.

    Returns the model, the ids that end a text (maybe none) and the kind of weights in words, such
    as "bfloat16" or "4-bit, bfloat16". Raises CheckpointError for files that are damaged,
    incomplete or of an unsupported kind, OptionError for settings that do not suit the model.
    """
    model = _read(directory, config)
    quantised = any(hasattr(module, "bits") for module in model.modules())
    if dtype != "auto" or (not quantised and mx.default_device() == mx.Device(mx.cpu)):
        _cast(model, mx.float32 if dtype == "auto" else getattr(mx, dtype))
    if q_bits is not None:
        if quantised:
            raise OptionError(f"{directory} is quantised already: leave the number of bits out")
        _quantise(model, q_bits, q_group_size)
    mx.eval(model.parameters())
    return DecoderOnlyModel(model, _max_length(config)), _eos(directory, config), _kind(model)


def _read(directory: Path, config: Mapping[str, Any]) -> nn.Module:
    """The model with its weights not computed yet, so that what fails later is no file's fault."""
    if config.get("model_file"):
        raise CheckpointError(
            f"{directory} needs its own Python file ({config['model_file']}) to run, and code from "
            "checkpoints is never run"
        )
    _check_files(directory)
    try:
        # Some of mlx-lm's models print remarks; standard output is for text alone.
        with contextlib.redirect_stdout(sys.stderr):
            model, _ = load_model(directory, lazy=True, get_model_classes=_checked_classes)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} cannot be loaded: {_first_line(error)}") from error
    model.__class__ = type(model).__mro__[1]
    return model


def _check_files(directory: Path) -> None:
    """Every file that mlx-lm will read, by name, while the name is still known."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a weight index: download it again") from error
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise CheckpointError(f"{directory} lacks {missing[0]}: download the model again")
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} has no model*.safetensors: convert the model first")
    for file in files:
        try:
            mx.load(str(file))
        except RuntimeError as error:
            raise CheckpointError(f"{file} is damaged: {_first_line(error)}") from error


def _checked_classes(config: dict[str, Any]) -> tuple[type[nn.Module], Any]:
    """mlx-lm's classes for a config, the model's with checks that name the first wrong key.

    Raises CheckpointError for a model_type that mlx-lm does not have.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError("config.json has no model_type: it does not describe a model")
    try:
        plain, arguments = _get_classes(config)
    except ValueError as error:
        raise CheckpointError(
            f"model_type {kind!r} is not supported by the installed mlx-lm"
        ) from error

    def load_weights(self: Any, weights: list[tuple[str, mx.array]], strict: bool = True) -> Any:
        _check_weights(dict(tree_flatten(self.parameters())), dict(weights))
        return plain.load_weights(self, weights, strict)

    body: dict[str, Any] = {"load_weights": load_weights}
    if hasattr(plain, "sanitize"):

        def sanitize(self: Any, weights: dict[str, mx.array]) -> Any:
            try:
                return plain.sanitize(self, weights)
            except KeyError as error:
                raise CheckpointError(f"weight {error.args[0]} is missing") from error

        body["sanitize"] = sanitize
    return type(plain.__name__, (plain,), body), arguments


def _check_weights(expected: Mapping[str, mx.array], given: Mapping[str, mx.array]) -> None:
    for problem, names in (
        ("is missing", sorted(expected.keys() - given.keys())),
        (
            "is not part of the model that config.json describes",
            sorted(given.keys() - expected.keys()),
        ),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"weight {names[0]} {problem}{more}: download the model again")
    for name in sorted(expected):
        if expected[name].shape != given[name].shape:
            raise CheckpointError(
                f"weight {name} has shape {given[name].shape} where config.json asks for "
                f"{expected[name].shape}"
            )


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    # Some models name weights that must stay in float32.
    may = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, array: mx.array) -> mx.array:
        return (
            array.astype(dtype) if may(path) and mx.issubdtype(array.dtype, mx.floating) else array
        )

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantise(model: nn.Module, bits: int, group_size: int) -> None:
    choice = getattr(model, "quant_predicate", None)

    def suits(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        return choice(path, module) if choice is not None else True

    try:
        nn.quantize(model, group_size, bits, class_predicate=suits)
    except ValueError as error:
        raise OptionError(f"cannot quantise to {bits} bits: {_first_line(error)}") from error
    if not any(hasattr(module, "bits") for module in model.modules()):
        raise OptionError(f"no layer's width is a multiple of {group_size}: take a smaller group")


def _max_length(config: Mapping[str, Any]) -> int | None:
    for part in (config.get("text_config") or {}, config):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def _eos(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    settings: Any = {}
    if generation.exists():
        try:
            settings = json.loads(generation.read_text("utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{generation} is not JSON: delete or replace it") from error
    for part in (settings, config, config.get("text_config") or {}):
        ids = part.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def _kind(model: nn.Module) -> str:
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).rpartition(".")[2]
            sizes[name] = sizes.get(name, 0) + array.nbytes
    floating = max(sizes, key=lambda name: sizes[name])
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")})
    return f"{'/'.join(map(str, bits))}-bit, {floating}" if bits else floating


def _first_line(error: Exception) -> str:
    text = str(error.args[0]) if error.args else ""
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
