"""params.json of Meta's Llama: sizes and the few numbers that decide what is computed.

Knows its keys, and what Meta's code takes where one is silent. What is not known is refused by
name, since it may change what the model computes. Reads no weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ...disk.json_file import read_json
from ..malformed import Malformed, naming
from .layout import LARGEST, Sizes

PARAMS = "params.json"
_KNOWN = (
    "dim n_layers n_heads n_kv_heads head_dim hidden_dim vocab_size multiple_of ffn_dim_multiplier "
    "norm_eps rope_theta use_scaled_rope rope_scaling_factor max_seq_len max_batch_size "
    "model_parallel_size"
)
_SCALED_BY = 8.0
# Meta's params.json does not say that Llama 3.2's text models, (width, layers), are stretched
# further than 3.1's; Hugging Face's config.json of the same models does.
_STRETCHED = {(2048, 16): 32.0, (3072, 28): 32.0}
_TRAINED = 8192
_LENGTHS = {10_000.0: 4096, 1_000_000.0: 16384, 500_000.0: 8192}
_FIRST_LLAMA = 2048


@dataclass(frozen=True)
class Params:
    """What params.json says. shape: the sizes but for the vocabulary. vocabulary: None where the
    weights have to say it. scaled_by: how far rotary positions are stretched, None for not at all.
    length: positions that the model was trained for."""

    file: Path
    shape: Mapping[str, int]
    vocabulary: int | None
    epsilon: float
    theta: float
    scaled_by: float | None
    length: int

    @property
    def queries(self) -> int:
        """Rows of a query matrix."""
        return self.shape["heads"] * self.shape["head_width"]

    def sizes(self, vocabulary: int) -> Sizes:
        """With as many tokens as the weights have. Raises CheckpointError where that is not what
        the file says, or no Llama has such sizes."""
        if self.vocabulary not in (None, vocabulary):
            raise CheckpointError(
                f"{self.file} asks for {self.vocabulary} tokens where the weights have {vocabulary}"
            )
        sizes = Sizes(vocabulary=vocabulary, **self.shape)
        with naming(self.file):
            sizes.check()
        return sizes

    @property
    def scaling(self) -> dict[str, Any]:
        """The entries of config.json about it, none where positions are not stretched."""
        if self.scaled_by is None:
            return {}
        return {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": self.scaled_by,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": _TRAINED,
            }
        }


def read_params(file: Path) -> Params:
    """Raises CheckpointError for a file that is no JSON object, lacks a number, has one that cannot
    be, or asks for something that is not known here."""
    if not file.is_file():
        raise CheckpointError(f"{file.parent} lacks {file.name}: download it again")
    given = {key: value for key, value in read_json(file).items() if value is not None}
    unknown = sorted(key for key in given.keys() - {*_KNOWN.split()} if given[key] is not False)
    if unknown:
        raise CheckpointError(f"{file} asks for {unknown[0]!a:.60}, which is not supported here")
    with naming(file):
        return _params(file, given)


def _params(file: Path, given: Mapping[str, Any]) -> Params:
    width, heads = _whole(given, "dim"), _whole(given, "n_heads")
    if "head_dim" not in given and width % heads:
        raise Malformed(f"asks for {heads} heads in a width of {width}")
    layers = _whole(given, "n_layers")
    shape = {
        "width": width,
        "inner": _inner(given, width),
        "layers": layers,
        "heads": heads,
        "kv_heads": _whole(given, "n_kv_heads", heads),
        "head_width": _whole(given, "head_dim", width // heads),
    }
    unsaid = given.get("vocab_size", -1) == -1
    vocabulary = None if unsaid else _whole(given, "vocab_size")
    epsilon, theta = _number(given, "norm_eps", 1e-5), _number(given, "rope_theta", 10_000.0)
    scaled = given.get("use_scaled_rope", False)
    if type(scaled) is not bool:
        raise Malformed("asks for use_scaled_rope that is neither true nor false")
    factor = None
    if scaled:
        usual = _STRETCHED.get((width, layers), _SCALED_BY)
        factor = _number(given, "rope_scaling_factor", usual)
    length = _length(given, epsilon, theta, scaled=scaled)
    return Params(file, shape, vocabulary, epsilon, theta, factor, length)


def _inner(given: Mapping[str, Any], width: int) -> int:
    """The width of the feed-forward networks: two thirds of four widths, times a factor, rounded up
    to a multiple."""
    if "hidden_dim" in given:
        return _whole(given, "hidden_dim")
    multiple = _whole(given, "multiple_of", 256)
    inner = 8 * width // 3
    if "ffn_dim_multiplier" in given:
        inner = int(inner * _number(given, "ffn_dim_multiplier", 1.0))
    return -(-inner // multiple) * multiple


def _length(given: Mapping[str, Any], epsilon: float, theta: float, *, scaled: bool) -> int:
    """params.json rarely says it; each generation has its own base of the rotation, and the first
    two differ in epsilon."""
    if "max_seq_len" in given:
        return _whole(given, "max_seq_len")
    if scaled:
        return 16 * _TRAINED
    if theta == 10_000.0 and epsilon <= 1e-6:
        return _FIRST_LLAMA
    return _LENGTHS.get(theta, min(_LENGTHS.values()))


def _whole(given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = given.get(key, default)
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise Malformed(f"needs {key}, a whole number above 0, not {value!a:.40}")
    return value


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value <= 1e12:
        raise Malformed(f"needs {key}, a number above 0, not {value!a:.40}")
    return float(value)
