"""config.json of a decoder-only model -> its outline.

Knows mlx-lm's classes, their arguments and their caches; imports mlx-lm and with it transformers
(about a second). Reads no weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..errors import CheckpointError
from ..text.tokenizer import Kind
from .base import Base
from .decoder_loading import cast, classes, in_asked_numbers, in_words, max_length
from .decoder_only import DecoderOnlyModel
from .outline import look_of, nbytes_of, stored_dtype
from .random_weights import fill

DEPTHS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")


class DecoderOnlyOutline:
    """Outline of any model that mlx-lm implements."""

    kind: Kind = "decoder-only"

    def __init__(
        self,
        config: Mapping[str, Any],
        name: str,
        dtype: str,
        q_bits: int | None,
        q_group_size: int,
        depth: int | None,
    ) -> None:
        if config.get("model_file"):
            raise CheckpointError(
                f"{name} needs its own Python file ({config['model_file']!a:.80}) to run, and "
                "code from checkpoints is never run"
            )
        self._config = config if depth is None else with_depth(config, depth)
        with own_randomness():
            network = network_of(self._config, name)
            self._network = in_asked_numbers(network, name, dtype, q_bits, q_group_size)
        self.dtype = in_words(self._network)
        self.nbytes = nbytes_of(self._network)
        blocks = list(getattr(self._network, "layers", ()))
        caches = make_prompt_cache(self._network)
        if depth is not None and len(blocks) != depth:
            raise CheckpointError(f"{name} cannot be cut to {depth} layers")
        looks = [_cache_look(cache) for cache in caches] if len(caches) == len(blocks) else []
        self.layers: Sequence[Hashable] = [
            (look_of(block), looks[place] if looks else None) for place, block in enumerate(blocks)
        ]
        self.layer_nbytes: Sequence[int] = [nbytes_of(block) for block in blocks]
        probe = self._network(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        self.vocabulary = int(probe.shape[-1])

    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """As Outline says: what the caches would hold after two such passes, not computed."""
        caches = make_prompt_cache(self._network)
        for rows in (prompt, *[1] * min(1, generated), generated - 1):
            if rows > 0:
                self._network(mx.zeros((1, rows), dtype=mx.int32), cache=caches)
        return sum(int(cache.nbytes) for cache in caches)

    def weights(self) -> Mapping[str, mx.array]:
        """As Outline says."""
        return dict(tree_flatten(self._network.parameters()))

    def model(self, seed: int = 0, given: Mapping[str, mx.array] | None = None) -> Base:
        """As Outline says."""
        fill(self._network, seed, given or {})
        return DecoderOnlyModel(self._network, max_length(self._config))


def with_depth(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The configuration of a model of the first `depth` layers; see `with_layers`."""
    return with_layers(config, range(depth))


def with_layers(config: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """The configuration of a model of some layers, named by their numbers.

    Lists with an entry per layer keep those of the chosen ones. Raises CheckpointError where
    config.json does not say how many layers there are.
    """
    changed = dict(config)
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and any(key in inner for key in DEPTHS):
        changed["text_config"] = with_layers(inner, chosen)
        return changed
    named = [key for key in DEPTHS if isinstance(config.get(key), int)]
    if not named:
        raise CheckpointError("config.json does not say how many layers there are")
    layers = config[named[0]]
    for key, value in config.items():
        if key in named:
            changed[key] = len(chosen)
        elif isinstance(value, list) and len(value) == layers:
            changed[key] = [value[number] for number in chosen if number < layers]
    return changed


def network_of(config: Mapping[str, Any], name: str) -> nn.Module:
    """mlx-lm's model with weights as they are stored, packed or not; nothing is computed."""
    kind, arguments = classes(config)
    try:
        network = kind(arguments.from_dict(dict(config)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name}: config.json does not make a model: {reason}") from error
    network.eval()
    cast(network, stored_dtype(config))
    stored = _stored_quantisation(config)
    if stored is not None:
        _pack(network, stored, name)
    return network


def _stored_quantisation(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How weights are packed, in mlx-lm's words; None where they are unpacked on loading."""
    entry = config.get("quantization")
    if isinstance(entry, Mapping):
        return entry
    theirs = config.get("quantization_config")
    theirs = theirs if isinstance(theirs, Mapping) else {}
    method = theirs.get("quant_method")
    if method in ("awq", "gptq"):
        return {"bits": theirs.get("bits"), "group_size": theirs.get("group_size")}
    if method in ("mxfp4", "mxfp8"):
        left = dict.fromkeys(theirs.get("modules_to_not_convert") or (), False)
        return {"bits": int(method[-1]), "group_size": 32, "mode": method, **left}
    return None


def _pack(network: nn.Module, stored: Mapping[str, Any], name: str) -> None:
    group, bits, mode = stored.get("group_size"), stored.get("bits"), stored.get("mode", "affine")
    if not isinstance(group, int) or not isinstance(bits, int):
        raise CheckpointError(f"{name}: config.json does not say how its weights are packed")

    def how(path: str, module: nn.Module) -> Any:
        own = next((stored[key] for key in stored if fnmatch(path, f"{key}*")), None)
        if not hasattr(module, "to_quantized") or own is False:
            return False
        if isinstance(own, Mapping):
            return own
        return module.weight.shape[-1] % group == 0

    try:
        nn.quantize(network, group, bits, mode=mode, class_predicate=how)
    except (TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name}: its quantisation is none of MLX's: {reason}") from error


def _cache_look(cache: Any) -> Hashable:
    return type(cache).__name__, getattr(cache, "max_size", None)


@contextmanager
def own_randomness() -> Iterator[None]:
    """mlx-lm's classes draw from MLX's global state, which is put back as it was."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed((high << 32) + low)
