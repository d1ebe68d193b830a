"""The files of a model's directory: the checked configuration, and tensors of any format."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from . import shards
from .disk import check_regular, read_json
from .formats.gguf import GgufFile
from .formats.safetensors import SafetensorsFile
from .formats.torch import TorchFile
from .tensors import LARGEST_SIZE, TensorInfo, TensorReader

CARRIED = (
    *("tokenizer*.json", "tokenizer.model", "*.tiktoken"),
    *("spiece.model", "sentencepiece.bpe.model", "*.spm"),
    *("special_tokens_map.json", "added_tokens.json", "*vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template*", "generation_config.json"),
)
"""Patterns of the files, other than weights, that a conversion copies."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling settings that are read from generation_config.json."""
VOCABULARIES = ("tokenizer.json", ".model", ".spm", "vocab.json", "vocab.txt", ".tiktoken")
"""Ends of the names of files with a vocabulary, the preferred first."""
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
"""Kinds of attention in `layer_types` of config.json."""
TEXT_CONFIG = "text_config"
"""The key in config.json with the settings of the language model, if it is a part of a model."""
LM_HEAD = "lm_head.weight"
"""The tensor of the output head, in Hugging Face's layout."""
LAYER_COUNT_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_FACTORS, _BLOCK = "_scale_inv", 128
"""DeepSeek and Qwen publish matrices of 8-bit floats (E4M3) with one factor per block of 128 x 128
weights. The name of the factors is the name of the matrix with this suffix."""
READERS: Mapping[str, Callable[[Path], TensorReader]] = {
    "safetensors": SafetensorsFile,
    "torch": TorchFile,
    "gguf": GgufFile,
}
"""Format as in `shards.FORMAT_NAMES` -> the reader of its files."""


class Weights(TensorReader):
    """The tensors of a directory, in the order of the files' bytes. Matrices of 8-bit floats with
    block scales are returned as bfloat16."""

    def __init__(self, directory: Path) -> None:
        """Raise CheckpointError for damaged or missing files, or a name that two files have."""
        super().__init__()
        parts, infos = shards.find(directory), self.infos
        self._places: dict[str, Path] = {}
        self._readers = {file: READERS[parts.format](file) for file in parts.files}
        self.format = parts.format
        self.lazy = parts.format == "safetensors"
        for file, reader in self._readers.items():
            self.paths += reader.paths
            self.stored |= reader.stored
            self.origins |= reader.origins
            self.tied |= reader.tied
            self.dropped |= reader.dropped
            self.shared |= reader.shared
            for name, info in reader.infos.items():
                if name in infos:
                    raise CheckpointError(f"{file} repeats {name} of {self._places[name].name}")
                infos[name], self._places[name] = info, file
        for name, shard in parts.places.items():
            if name not in infos or self._places[name].name != shard:
                lacks = f"{directory / shard} lacks {ascii(name)[1:-1]:.200}"
                says = f"which {parts.index} says it has: download both again"
                raise CheckpointError(f"{lacks}, {says}")
        self._factors = _factors_of(infos)
        for name, factors in self._factors.items():
            infos[name] = TensorInfo.of("BF16", infos[name].shape)
            del infos[factors], self.origins[factors]
            self.dropped[factors] = "the matrix is multiplied by it"

    def note(self) -> str:
        return "; ".join(filter(None, (reader.note() for reader in self._readers.values())))

    def read(self, name: str) -> mx.array:
        """Return a tensor, as a lazy array if `lazy` is true."""
        array = self._readers[self._places[name]].read(name)
        if (factors := self._factors.get(name)) is None:
            return array
        return _multiplied(array, self._readers[self._places[factors]].read(factors))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    inner = config.get(TEXT_CONFIG)
    return inner if isinstance(inner, Mapping) else config


def _factors_of(infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the name of every matrix of 8-bit floats that has factors -> the factors' name."""
    found = {}
    for name, info in infos.items():
        if info.dtype == "F8_E4M3" and len(info.shape) > 1 and name + _FACTORS in infos:
            *outer, rows, columns = info.shape
            if infos[name + _FACTORS].shape == (*outer, -(-rows // _BLOCK), -(-columns // _BLOCK)):
                found[name] = name + _FACTORS
    return found


def _multiplied(weight: mx.array, factors: mx.array) -> mx.array:
    """Return the values of a matrix, lazily, as computed by DeepSeek's code. weight: E4M3 as uint8,
    shape (..., rows, columns)."""
    spread = factors.astype(mx.float32)
    for axis in (-2, -1):
        spread = mx.take(spread, mx.arange(weight.shape[axis]) // _BLOCK, axis=axis)
    return (mx.from_fp8(weight, dtype=mx.float32) * spread).astype(mx.bfloat16)


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json. Raises CheckpointError if it is missing or has no model_type."""
    file = directory / "config.json"
    if not file.is_file():
        if shards.format_of(directory) == "gguf":
            raise CheckpointError(f"{directory} is a GGUF model: convert it first, with convert.py")
        raise CheckpointError(f"{directory} has no config.json: it is not a model's directory")
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file} has no model_type: it does not describe a model")
    return config


Config = Mapping[str, Any]


def whole_number(
    config: Config, name: str, default: int | None = None, most: int = LARGEST_SIZE, least: int = 1
) -> int:
    """Return a size or, if `least` is 0, a token id in config.json. Raises CheckpointError unless
    it is from `least` to `most`."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= most:
        raise CheckpointError(
            f"config.json has {name} {value!a:.40}: need a whole number from {least} to {most}"
        )
    return value


def check_runs_no_code(name: object, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a model that needs its own Python file."""
    if config.get("model_file"):
        code = f"{config['model_file']!a:.80}"
        raise CheckpointError(f"{name} needs code of its own, {code}: none is run")


def eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a sequence, from generation_config.json or else config.json."""
    file = directory / "generation_config.json"
    for part in (read_json(file) if file.is_file() else {}, config):
        if (ids := part.get("eos_token_id")) is not None:
            tokens = ids if isinstance(ids, list) else [ids]
            if not all(type(token) is int for token in tokens):
                raise CheckpointError(f"{directory} has an eos_token_id that is none: {ids!a:.80}")
            return tuple(tokens)
    return ()


def sampling_settings(directory: Path) -> dict[str, object]:
    """Return the sampling settings of generation_config.json, unchecked. They count only if its
    `do_sample` is true; its temperature is then 1 unless it names another, as in transformers."""
    file = directory / "generation_config.json"
    config = read_json(file) if file.is_file() else {}
    if config.get("do_sample") is not True:
        return {}
    named = {name: config[name] for name in SAMPLING if config.get(name) is not None}
    return {"temperature": 1.0, **named}


def tokenizer_files(directory: Path) -> list[Path]:
    """List the files, other than weights, that a conversion copies. Raises CheckpointError for a
    link out of the directory."""
    carried = {file for pattern in CARRIED for file in directory.glob(pattern) if file.is_file()}
    for file in carried:
        check_regular(file)
    return [shards.inside(file) for file in sorted(carried)]


def vocabulary_file(directory: Path) -> str:
    """Return the name of the file with the vocabulary, or "" without one."""
    names = [path.name for path in tokenizer_files(directory)]
    return next((name for end in VOCABULARIES for name in names if name.endswith(end)), "")
